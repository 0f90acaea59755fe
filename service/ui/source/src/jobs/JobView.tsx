// One job: how far it is, its answer in sentences, its figures so far, its files.
import { useRef, useState } from "preact/hooks";
import { type ApiError, asApiError, json } from "../api";
import { count, Problem, seconds } from "../controls";
import { Figures } from "../figures";
import { Prose } from "../prose";
import { askedOf } from "./asked";
import { Download } from "./Download";
import { isUnfinished, type Job, type Result, useJob, useResult } from "./follow";

const FILES: [link: string, name: string, text: string][] = [
  ["results.csv", "results.csv", "CSV"],
  ["results.json", "results.json", "JSON"],
  ["results.parquet", "results.parquet", "Parquet"],
  ["plot.png", "plot.png", "PNG"],
  ["plot.svg", "plot.svg", "SVG"],
  ["report.html", "report.html?standalone=true", "Report, HTML"],
  ["units.csv", "units.csv", "Units, CSV"],
];

type Props = {
  id: string;
  /** By the job itself where it is absent. */
  title?: string;
  only?: string;
  changed?: () => void;
  /** Another number makes it look at the job again. */
  looks?: number;
  /** A detached job goes on, and the page does not follow it. */
  detached?: boolean;
  detach: (detached: boolean) => void;
  /** Whether finished jobs can be closed too. */
  closes?: boolean;
};

/** An action that failed: its words, how to repeat it, and the states in which it has a purpose. */
type Failure = { text: string; again: () => void; isOpen: (job: Job | null) => boolean };
type Act = { path: string; method: string; not: string; isOpen: (job: Job | null) => boolean };
const isEnded = (job: Job | null) => job?.state === "cancelled" || job?.state === "failed";

export function JobView({ id, title: given, only, changed, looks = 0, detached = false, detach, closes = false }: Props) {
  const [version, setVersion] = useState(0);
  const [failure, setFailure] = useState<Failure | null>(null);
  const heading = useRef<HTMLHeadingElement>(null);
  const { job, error } = useJob(id, version + looks, detached);
  const { result, refused } = useResult(detached ? null : job);
  const title = given ?? `Job ${id.slice(0, 8)}${job ? `: ${job.evaluation}` : ""}`;
  const look = () => setVersion((before) => before + 1);
  /** The button that was pressed goes: the focus goes to the job's heading. */
  const act = async (action: Act) => {
    heading.current?.focus();
    setFailure(null);
    try {
      await json(action.path, { method: action.method });
    } catch (refused) {
      const text = `The job was not ${action.not}: ${asApiError(refused).message}`;
      setFailure({ text, again: () => act(action), isOpen: action.isOpen });
    }
    look();
    changed?.();
  };
  const again = () => {
    heading.current?.focus();
    look();
  };
  const failed = (error: ApiError | null, again: () => void) =>
    setFailure(error && { text: error.message, again, isOpen: () => true });
  const shown = failure?.isOpen(job) ? failure : null;
  const verb = detached ? "Open" : isUnfinished(job) ? "Detach" : "Close";
  return (
    <section class="job" aria-label={title} data-state={detached ? "detached" : (job?.state ?? "loading")}>
      <h3 class="title" tabIndex={-1} ref={heading}>{title}</h3>
      {detached && <p class="hint" role="status">Detached: the job goes on, and this page does not follow it.</p>}
      {!detached && job && askedOf(job) && <p class="hint">{askedOf(job)}</p>}
      {!detached && <Problem text={shown?.text ?? error?.message} again={shown?.again ?? again} />}
      {!detached && job && <Bar job={job} />}
      <div class="chips">
        {(detached || isUnfinished(job) || closes) && (
          <button type="button" aria-label={`${verb} ${title}`} onClick={() => detach(!detached)}>{verb}</button>
        )}
        {!detached && job && <Actions job={job} act={act} failed={failed} />}
      </div>
      {!detached && job?.error && <p class="error"><Prose text={job.error.message} /></p>}
      {!detached && job?.stalled && <p class="error">{job.stalled}</p>}
      {!detached && job && job.not_served.length > 0 && <p class="error">It waits for a server of {job.not_served.join(", ")}.</p>}
      {!detached && result && <Answer result={result} only={only} isDone={job?.state === "done"} />}
      {!detached && job?.state === "done" && !result && !refused && <p class="hint" role="status">Drawing the figures</p>}
      {!detached && refused && <p class="error"><Prose text={refused} /></p>}
    </section>
  );
}

type ActionsProps = { job: Job; act: (action: Act) => void; failed: (error: ApiError | null, again: () => void) => void };

function Actions({ job, act, failed }: ActionsProps) {
  const path = `jobs/${job.id}`;
  const cancel: Act = { path, method: "DELETE", not: "cancelled", isOpen: isUnfinished };
  const resume: Act = { path: `${path}/resume`, method: "POST", not: "resumed", isOpen: isEnded };
  return (
    <>
      {isUnfinished(job) && <button type="button" onClick={() => act(cancel)}>Cancel</button>}
      {isEnded(job) && <button type="button" onClick={() => act(resume)}>Resume</button>}
      {FILES.filter(([link]) => job.links[link]).map(([link, name, text]) => (
        <Download key={link} path={`${path}/${name}`} file={`${job.evaluation}-${job.id.slice(0, 8)}-${link}`} text={text} failed={failed} />
      ))}
    </>
  );
}

/** The last figures of a job that `isDone` are drawn for some seconds: until then, those on the page are older. */
function Answer({ result, only, isDone }: { result: Result; only: string | undefined; isDone: boolean }) {
  const missing = Object.keys(result.partial?.missing ?? {});
  return (
    <>
      <div class="words">{result.words.map((sentence) => <p key={sentence}><Prose text={sentence} /></p>)}</div>
      {missing.length > 0 && (
        <p class="hint" role="status">{isDone ? "These are the figures before its end" : `Not complete yet: ${missing.join(", ")}`}</p>
      )}
      <Figures pictures={{ ...result, figures: result.figures.filter((one) => !only || one.name === only) }} />
    </>
  );
}

export function Bar({ job }: { job: Job }) {
  const left = job.seconds_left === null || !isUnfinished(job) ? "" : ` · about ${seconds(job.seconds_left)} left`;
  const spent = job.seconds ? ` · ${seconds(job.seconds)} of measuring` : "";
  const reused = job.units_reused ? ` · ${count(job.units_reused)} not measured again` : "";
  return (
    <div class="progress">
      <progress max={job.tokens_total || 1} value={job.state === "done" ? job.tokens_total || 1 : job.tokens_done} aria-label={`Progress of ${job.evaluation}`} />
      <p class="hint" role="status">
        {job.state} · {count(job.units_done)} of {count(job.units_total)} units{spent}{left}{reused}
      </p>
    </div>
  );
}
