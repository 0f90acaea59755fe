// A job of the server, followed to its end: over a lost connection and a restart, and not while it is not shown.
import { useEffect, useState } from "preact/hooks";
import { type ApiError, asApiError, events, isAbort, json } from "../api";
import type { Pictures } from "../figures";

export type Job = {
  id: string;
  evaluation: string;
  model: string | null;
  not_served: string[];
  state: "queued" | "running" | "done" | "failed" | "cancelled";
  created_at: string;
  units_total: number;
  units_done: number;
  units_reused: number;
  tokens_total: number;
  tokens_done: number;
  seconds: number;
  seconds_left: number | null;
  error: { message: string } | null;
  request: Record<string, unknown>;
  links: Record<string, string>;
};

export type Result = Pictures & { words: string[]; partial: { missing: Record<string, number> } | null };

const RETRY_MS = [1000, 2000, 5000, 10000, 30000];

export function isUnfinished(job: Job | null): boolean {
  return job?.state === "queued" || job?.state === "running";
}

/** The job, renewed by its events unless detached; `version` makes it look again, after a resume. */
export function useJob(id: string, version: number, detached: boolean): { job: Job | null; error: ApiError | null } {
  const [job, setJob] = useState<Job | null>(null);
  const [error, setError] = useState<ApiError | null>(null);
  useEffect(() => {
    if (detached) return;
    const leaving = new AbortController();
    follow(id, leaving.signal, setJob, setError).catch(() => {});
    return () => leaving.abort();
  }, [id, version, detached]);
  return { job, error };
}

async function follow(
  id: string,
  signal: AbortSignal,
  found: (job: Job) => void,
  failed: (error: ApiError | null) => void,
): Promise<void> {
  for (let tries = 0; !signal.aborted; tries++) {
    try {
      let job = await json<Job>(`jobs/${id}`, { signal });
      found(job);
      failed(null);
      if (!isUnfinished(job)) return;
      for await (const [name, data] of events(`jobs/${id}/events`, { signal })) {
        tries = 0;
        if (name === "unit") job = { ...job, state: "running", units_done: Math.max(job.units_done, data.number) };
        else job = { ...data, links: data.links, request: job.request };
        found(job);
        if (!isUnfinished(job)) return;
      }
    } catch (error) {
      if (isAbort(error)) return;
      const failure = asApiError(error);
      failed(failure);
      if (isFinal(failure)) return;
    }
    await pause(tries);
  }
}

/** True for a refusal, which the same request would get again. */
function isFinal({ status }: ApiError): boolean {
  return status >= 400 && status < 500 && status !== 429;
}

function pause(tries: number): Promise<void> {
  return new Promise((done) => setTimeout(done, RETRY_MS[Math.min(tries, RETRY_MS.length - 1)]));
}

/** The figures of the complete methods so far, asked for when units are finished, one request at a time. */
export function useResult(job: Job | null): Result | null {
  const [result, setResult] = useState<Result | null>(null);
  const [busy, setBusy] = useState(false);
  const [read, setRead] = useState("");
  const [tries, setTries] = useState(0);
  const wanted = job?.units_done && job.state !== "queued" ? `${job.id} ${job.state} ${job.units_done}` : "";
  useEffect(() => {
    if (!wanted || busy || wanted === read) return;
    setBusy(true);
    json<Result>(`jobs/${job!.id}/figures.json`)
      .then(
        (found) => {
          setResult(found);
          return true;
        },
        // A refusal: no method is complete yet, and the next unit asks again. Else the server restarts.
        (failure) => isFinal(asApiError(failure)) || pause(tries).then(() => false),
      )
      .then((answered) => {
        if (answered) setRead(wanted);
        setTries(answered ? 0 : tries + 1);
        setBusy(false);
      });
  }, [wanted, busy, read]);
  return result;
}
