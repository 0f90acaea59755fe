// The list of jobs, and what can be done with each.
import { Fragment } from "preact";
import { count } from "../controls";
import { shortText } from "../text";
import { askedOf } from "./asked";
import { COMPARABLE, MOST_COMPARED } from "./Comparison";
import { isUnfinished, type Job, modelOf } from "./follow";

const MOST_SHOWN = 4;
/** Encodings of a job of these that names none; all other evaluations measure the model's own. */
const PROPOSED = "proposed by the methods";
const PROPOSING = new Set(["recommend", "search"]);

type Props = {
  jobs: Job[];
  opened: string;
  open: (job: Job) => void;
  forget: (job: Job) => void;
  /** Ids of the jobs in the comparison, in its order. */
  compared: string[];
  compare: (ids: string[]) => void;
};

export function JobList({ jobs, opened, open, forget, compared, compare }: Props) {
  return (
    <div class="scroll whole" tabIndex={0} role="region" aria-label="List of jobs">
      <table class="list">
        <thead>
          <tr><th>Job</th><th>State</th><th>Units</th><th>Model</th><th>Encodings</th><th>Created</th><th>Actions</th></tr>
        </thead>
        <tbody>
          {jobs.map((job) => (
            <tr key={job.id} aria-current={job.id === opened ? "true" : undefined}>
              <td>{job.evaluation}<Asked job={job} /></td>
              <td>{job.state}</td>
              <td>{count(job.units_done)} of {count(job.units_total)}</td>
              <td>{modelOf(job)}</td>
              <td class="encodings"><Encodings job={job} /></td>
              <td>{new Date(job.created_at).toLocaleString()}</td>
              <td>
                <div class="chips">
                  <button type="button" id={opener(job.id)} aria-label={`Open ${nameOf(job)}`} onClick={() => open(job)}>Open</button>
                  <Compare job={job} why={refusal(job, jobs, compared)} compared={compared} compare={compare} />
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
  );
}

/** Why a job cannot be added to those that are `compared`, if so. */
function refusal(job: Job, jobs: Job[], compared: string[]): string | undefined {
  if (compared.includes(job.id)) return undefined;
  const first = jobs.find((one) => one.id === compared[0]);
  if (first && first.evaluation !== job.evaluation) return `The comparison has jobs of ${first.evaluation} alone`;
  return compared.length < MOST_COMPARED ? undefined : `A comparison has at most ${MOST_COMPARED} jobs`;
}

type CompareProps = { job: Job; why: string | undefined; compared: string[]; compare: (ids: string[]) => void };

/** A switch that stays in its place: the focus stays on it. */
function Compare({ job, why, compared, compare }: CompareProps) {
  if (job.state !== "done" || !COMPARABLE.includes(job.evaluation)) return null;
  const isIn = compared.includes(job.id);
  const others = compared.filter((id) => id !== job.id);
  return (
    <button type="button" aria-label={`Compare ${nameOf(job)}`} aria-pressed={isIn} disabled={why !== undefined} title={why}
      onClick={() => compare(isIn ? others : [...others, job.id])}>
      Compare
    </button>
  );
}

function Asked({ job }: { job: Job }) {
  const asked = askedOf(job);
  return asked ? <p class="hint">{asked}</p> : null;
}

export function nameOf(job: Job): string {
  return `${job.evaluation} ${job.id.slice(0, 8)}`;
}

/** Id of the button that opens a job: it gets the focus back. */
export function opener(job: string): string {
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
