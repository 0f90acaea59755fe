// Jobs of this server and API key: what runs and ran, and one of them opened.
import { Fragment } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import { type ApiError, asApiError, json, request } from "../api";
import { CopyLink, count, Problem } from "../controls";
import { shortText } from "../text";
import type { Method, Model } from "../types";
import { useSettings } from "../view";
import { isUnfinished, type Job } from "./follow";
import { JobView } from "./JobView";

export const TAB = "jobs";
const LOOK = "look-again";
const PAGE = 50;
/** The server lists no more at once. */
const MOST = 1000;
const LOOK_AGAIN_MS = 3000;
const MOST_SHOWN = 4;
/** Encodings of a job of these that names none; all other evaluations measure the model's own. */
const PROPOSED = "proposed by the methods";
const PROPOSING = new Set(["recommend", "search"]);

export function Jobs(_: { models: Model[]; methods: Method[] }) {
  const [settings, change] = useSettings(TAB, { job: "" });
  const { jobs, more, error, look, older } = useJobs();
  const [failure, setFailure] = useState<ApiError | null>(null);
  const [looks, setLooks] = useState(0);
  const lookAgain = () => {
    setLooks((before) => before + 1);
    look();
  };
  const forget = async (job: Job) => {
    if (!confirm(`Forget the job ${nameOf(job)} and its files? They cannot be brought back.`)) return;
    try {
      await request(`jobs/${job.id}?forget=true`, { method: "DELETE" });
      setFailure(null);
      if (settings.job === job.id) change({ job: "" });
      focusBeside(job, jobs ?? []);
    } catch (refused) {
      setFailure(asApiError(refused));
    }
    look();
  };
  const open = (job: Job) => {
    change({ job: job.id });
    requestAnimationFrame(() => document.querySelector<HTMLElement>(".jobs .job h3")?.focus());
  };
  const close = () => {
    document.getElementById(opener(settings.job))?.focus();
    change({ job: "" });
  };
  return (
    <div class="jobs">
      <div class="actions">
        <button type="button" id={LOOK} onClick={lookAgain}>Look again</button>
        <CopyLink />
      </div>
      <Problem text={failure?.message ?? error?.message} again={look} />
      {settings.job && (
        <JobView key={settings.job} id={settings.job} changed={look} looks={looks} detach={close} closes />
      )}
      {jobs?.length === 0 && <p>No jobs yet: “How far does it read?” starts some.</p>}
      {jobs !== null && jobs.length > 0 && (
        <div class="scroll whole" tabIndex={0} role="region" aria-label="List of jobs">
          <table class="list">
            <thead>
              <tr><th>Job</th><th>State</th><th>Units</th><th>Model</th><th>Encodings</th><th>Created</th><th>Actions</th></tr>
            </thead>
            <tbody>
              {jobs.map((job) => (
                <tr key={job.id} aria-current={job.id === settings.job ? "true" : undefined}>
                  <td>{job.evaluation}</td>
                  <td>{job.state}</td>
                  <td>{count(job.units_done)} of {count(job.units_total)}</td>
                  <td>{job.model ?? job.models.join(", ")}</td>
                  <td class="encodings"><Encodings job={job} /></td>
                  <td>{new Date(job.created_at).toLocaleString()}</td>
                  <td>
                    <div class="chips">
                      <button type="button" id={opener(job.id)} aria-label={`Open ${nameOf(job)}`} onClick={() => open(job)}>Open</button>
                      {!isUnfinished(job) && (
                        <button type="button" aria-label={`Forget ${nameOf(job)}`} onClick={() => forget(job)}>Forget</button>
                      )}
                    </div>
                  </td>
                </tr>
              ))}
            </tbody>
          </table>
        </div>
      )}
      {more && <button type="button" onClick={older}>Older jobs</button>}
    </div>
  );
}

function nameOf(job: Job): string {
  return `${job.evaluation} ${job.id.slice(0, 8)}`;
}

/** Focus the row after the forgotten one, which goes: else the one before it, else the button above the list. */
function focusBeside(job: Job, jobs: Job[]): void {
  const index = jobs.findIndex((one) => one.id === job.id);
  const next = jobs[index + 1] ?? jobs[index - 1];
  document.getElementById(next ? opener(next.id) : LOOK)?.focus();
}

/** Id of the button that opens a job: it gets the focus back. */
function opener(job: string): string {
  return `open-${job}`;
}

/** Each in one piece with its comma, so that no line begins with one. The server lists a long request as an empty one. */
function Encodings({ job }: { job: Job }) {
  if (!Object.keys(job.request).length) return null;
  const methods = (job.request.methods ?? [PROPOSING.has(job.evaluation) ? PROPOSED : "default"]) as unknown[];
  const texts = methods.map((one) => (typeof one === "string" ? one : shortText(one as Record<string, unknown>)));
  const [shown, more] = [texts.slice(0, MOST_SHOWN), texts.length - MOST_SHOWN];
  return (
    <>
      {shown.map((text, index) => (
        <Fragment key={index}><span>{text}{index < shown.length - 1 && ","}</span>{" "}</Fragment>
      ))}
      {more > 0 && `and ${more} more`}
    </>
  );
}

/** The newest jobs, and older ones on request. While one of them is unfinished and the list is in view, it is renewed. */
function useJobs() {
  const rows = useRef(PAGE);
  const reads = useRef(0);
  const [jobs, setJobs] = useState<Job[] | null>(null);
  const [more, setMore] = useState(false);
  const [error, setError] = useState<ApiError | null>(null);
  const read = async () => {
    const [limit, number] = [rows.current, ++reads.current];
    try {
      const { jobs: found } = await json<{ jobs: Job[] }>(`jobs?limit=${limit}`);
      if (number !== reads.current) return;
      setJobs(found);
      setMore(found.length === limit && limit < MOST);
      setError(null);
    } catch (failure) {
      if (number === reads.current) setError(asApiError(failure));
    }
  };
  const older = () => {
    rows.current = Math.min(MOST, rows.current + PAGE);
    read();
  };
  useEffect(() => {
    const open = () => location.hash.startsWith(`#${TAB}`) && !document.hidden;
    const shown = () => void (open() && read());
    read();
    addEventListener("hashchange", shown);
    document.addEventListener("visibilitychange", shown);
    return () => {
      removeEventListener("hashchange", shown);
      document.removeEventListener("visibilitychange", shown);
    };
  }, []);
  useEffect(() => {
    if (!jobs?.some(isUnfinished)) return;
    const timer = setTimeout(() => location.hash.startsWith(`#${TAB}`) && !document.hidden && read(), LOOK_AGAIN_MS);
    return () => clearTimeout(timer);
  }, [jobs, error]); // a failure is a new one each time: the list looks again after a restart
  return { jobs, more, error, look: () => void read(), older };
}
