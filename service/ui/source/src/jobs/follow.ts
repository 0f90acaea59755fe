// A job of the server, followed to its end: over a lost connection and a restart, and not while it is not shown.
import { useEffect, useState } from "preact/hooks";
import { ApiError, asApiError, events, isAbort, json } from "../api";
import type { Pictures } from "../figures";

export type Job = {
  id: string;
  evaluation: string;
  model: string | null;
  models: string[];
  not_served: string[];
  stalled: string | null;
  state: "queued" | "running" | "done" | "failed" | "cancelled";
  created_at: string;
  units_total: number;
  units_done: number;
  units_reused: number;
  tokens_total: number;
  tokens_done: number;
  tokens_reused: number;
  seconds: number;
  seconds_left: number | null;
  error: { message: string } | null;
  request: Record<string, unknown>;
  links: Record<string, string>;
};

export type Result = Pictures & { words: string[]; partial: { missing: Record<string, number> } | null };

/** Characters of an id: anything else, from a link, would be another address. */
const ID = /^[\w-]+$/;
/** True for a text that can be a job's id, and so a part of a path. */
export const isId = (text: string): boolean => ID.test(text);
export const noSuchJob = (id: string): ApiError => new ApiError(404, `no such job: ${id}`);

const RETRY_MS = [1000, 2000, 5000, 10000, 30000];

export function isUnfinished(job: Job | null): boolean {
  return job?.state === "queued" || job?.state === "running";
}

/** As it was requested, else the models that the job ran on. */
export function modelOf(job: Job): string {
  return job.model ?? job.models.join(", ");
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
  if (!isId(id)) return failed(noSuchJob(id));
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
export function isFinal({ status }: ApiError): boolean {
  return status >= 400 && status < 500 && status !== 429;
}

function pause(tries: number): Promise<void> {
  return new Promise((done) => setTimeout(done, RETRY_MS[Math.min(tries, RETRY_MS.length - 1)]));
}

/**
 * The figures of what is complete so far, asked for when units are finished, one request at a time.
 * A job has few before its first method is complete: requests begin where one may be, and wait longer after each refusal.
 */
export function useResult(job: Job | null): { result: Result | null; refused: string | undefined } {
  const [result, setResult] = useState<Result | null>(null);
  const [refused, setRefused] = useState<string | undefined>();
  const [busy, setBusy] = useState(false);
  const [read, setRead] = useState("");
  const [tries, setTries] = useState(0);
  const [after, setAfter] = useState(0);
  const isDue = job && job.state !== "queued" && (!isUnfinished(job) || job.units_done >= Math.max(after, unitsOfOneMethod(job)));
  const wanted = isDue && job.units_done ? `${job.id} ${job.state} ${job.units_done}` : "";
  useEffect(() => {
    if (!wanted || busy || wanted === read) return;
    setBusy(true);
    json<Result>(`jobs/${job!.id}/figures.json`)
      .then(
        (found) => {
          setResult(found);
          setRefused(undefined);
          return true;
        },
        (failure) => {
          setAfter(2 * job!.units_done);
          if (isFinal(asApiError(failure)) && job!.state === "done") setRefused(asApiError(failure).message);
          return isFinal(asApiError(failure)) || pause(tries).then(() => false); // not final: the server restarts
        },
      )
      .then((answered) => {
        if (answered) setRead(wanted);
        setTries(answered ? 0 : tries + 1);
        setBusy(false);
      });
  }, [wanted, busy, read]);
  return { result, refused };
}

/** Fewest units before a method can be complete, if each has as many; 0 where the methods are not known. */
function unitsOfOneMethod({ units_total, request }: Job): number {
  return Array.isArray(request.methods) ? units_total / request.methods.length : 0;
}
