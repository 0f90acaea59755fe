// Jobs of this server and API key: what runs and ran, one of them opened, and several compared.
import { useEffect, useRef, useState } from "preact/hooks";
import { type ApiError, asApiError, json, request } from "../api";
import { CopyLink, Problem } from "../controls";
import type { Method, Model } from "../types";
import { useSettings } from "../view";
import { Comparison, withJobs } from "./Comparison";
import { isUnfinished, type Job } from "./follow";
import { JobView } from "./JobView";
import { JobList, nameOf, opener } from "./List";

export const TAB = "jobs";
const LOOK = "look-again";
const PAGE = 50;
/** The server lists no more at once. */
const MOST = 1000;
const LOOK_AGAIN_MS = 3000;
const AT_FIRST = { job: "", compare: [] as string[], names: [] as string[], baseline: "" };

export function Jobs(_: { models: Model[]; methods: Method[] }) {
  const [settings, change] = useSettings(TAB, AT_FIRST);
  const { jobs, more, error, look, older } = useJobs();
  const [failure, setFailure] = useState<{ job: Job; error: ApiError } | null>(null);
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
      change({ ...withJobs(settings, settings.compare.filter((id) => id !== job.id)), ...(settings.job === job.id && { job: "" }) });
      focusBeside(job, jobs ?? []);
    } catch (refused) {
      setFailure({ job, error: asApiError(refused) });
    }
    look();
  };
  const open = (job: Job) => {
    change({ job: job.id });
    requestAnimationFrame(() => document.querySelector<HTMLElement>(".opened h3")?.focus());
  };
  const close = () => {
    document.getElementById(opener(settings.job))?.focus();
    change({ job: "" });
  };
  const clear = () => {
    document.getElementById(LOOK)?.focus();
    change(withJobs(settings, []));
  };
  const compare = (ids: string[]) => {
    change(withJobs(settings, ids));
    if (ids.length > Math.max(settings.compare.length, 1)) {
      requestAnimationFrame(() => document.querySelector(".comparison")?.scrollIntoView());
    }
  };
  const isHere = failure && jobs?.some((one) => one.id === failure.job.id);
  return (
    <div class="jobs">
      <div class="actions">
        <button type="button" id={LOOK} onClick={lookAgain}>Look again</button>
        <CopyLink />
      </div>
      {isHere
        ? <Problem text={`The job was not forgotten: ${failure.error.message}`} again={() => forget(failure.job)} />
        : <Problem text={error?.message} again={look} />}
      {settings.job && (
        <div class="opened">
          <JobView key={settings.job} id={settings.job} changed={look} looks={looks} detach={close} closes />
        </div>
      )}
      {settings.compare.length > 0 && <Comparison asked={settings} change={change} listed={jobs ?? []} clear={clear} />}
      {jobs?.length === 0 && <p>No jobs yet: “How far does it read?” starts some.</p>}
      {jobs !== null && jobs.length > 0 && (
        <JobList jobs={jobs} opened={settings.job} open={open} forget={forget}
          compared={settings.compare} compare={compare} />
      )}
      {more && <button type="button" onClick={older}>Older jobs</button>}
    </div>
  );
}

/** Focus the row after the forgotten one, which goes: else the one before it, else the button above the list. */
function focusBeside(job: Job, jobs: Job[]): void {
  const index = jobs.findIndex((one) => one.id === job.id);
  const next = jobs[index + 1] ?? jobs[index - 1];
  document.getElementById(next ? opener(next.id) : LOOK)?.focus();
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
