// Several finished jobs of one evaluation beside each other: words, figures and files of the server's comparison.
import { useEffect, useState } from "preact/hooks";
import { type ApiError, asApiError, isAbort, json } from "../api";
import { Problem } from "../controls";
import { Figures } from "../figures";
import { Prose } from "../prose";
import { askedOf } from "./asked";
import { Download } from "./Download";
import { isFinal, isId, type Job, modelOf, noSuchJob, type Result } from "./follow";

/** Evaluations with a number for each method and length; a test compares this with the server's. */
export const COMPARABLE = ["perplexity", "long_perplexity", "passkey", "needle", "ruler"];
/** Jobs in one comparison, as on the server; a test compares. */
export const MOST_COMPARED = 8;
/** Of a job's id, as its name. */
const NAME_CHARS = 8;
/** The server takes 1,000 for all names. */
const MOST_OF_A_NAME = 100;
const FILES: [name: string, text: string, options?: Record<string, string>][] = [
  ["results.csv", "CSV"],
  ["plot.png", "PNG"],
  ["plot.svg", "SVG"],
  ["report.html", "Report, HTML", { standalone: "true" }],
];

type Props = {
  /** All others are compared with the first. */
  ids: string[];
  /** Jobs that are known already. */
  listed: Job[];
  clear: () => void;
};

export function Comparison({ ids, listed, clear }: Props) {
  const { jobs, result, error, again } = useComparison(ids, listed);
  const [failure, setFailure] = useState<{ error: ApiError; again: () => void } | null>(null);
  const names = jobs && namesOf(jobs);
  const isComparing = ids.length > 1 && !result && !error;
  useEffect(() => setFailure(null), [ids.join()]);
  return (
    <section class="job comparison" aria-label="Comparison" aria-busy={isComparing}>
      <h3 class="title">Comparison</h3>
      <ol>{ids.map((id) => <li key={id}><Chosen id={id} job={(jobs ?? listed).find((one) => one.id === id)} /></li>)}</ol>
      {ids.length < 2 && <p class="hint" role="status">Choose another job of this evaluation. All others are compared with the first.</p>}
      <Problem text={error?.message.replace(/^jobs: /, "")} again={error && !isFinal(error) ? again : undefined} />
      <Problem text={failure?.error.message} again={failure?.again} />
      <div class="chips">
        <button type="button" onClick={clear}>End the comparison</button>
        {result && FILES.map(([file, text, options]) => (
          <Download key={file} path={pathOf(ids, file, { ...names, ...options })} text={text}
            file={`comparison-${shortened(ids[0]!)}-${file}`} failed={(error, again) => setFailure(error && { error, again })} />
        ))}
      </div>
      {isComparing && <p class="hint" role="status">Comparing</p>}
      {result && (
        <>
          <div class="words">{result.words.map((sentence) => <p key={sentence}><Prose text={sentence} /></p>)}</div>
          <Figures pictures={result} />
        </>
      )}
    </section>
  );
}

function Chosen({ id, job }: { id: string; job: Job | undefined }) {
  return <>{[shortened(id), ...(job ? [job.evaluation, modelOf(job), askedOf(job)] : [])].filter(Boolean).join(" · ")}</>;
}

function shortened(id: string): string {
  return id.slice(0, NAME_CHARS);
}

function pathOf(ids: string[], file: string, options: Record<string, string>): string {
  const query = new URLSearchParams(options).toString();
  return `comparisons/${ids.join(",")}/${file}${query && `?${query}`}`;
}

/** The models of the jobs as their names, with the start of the id where two have one. Of one model alone, the server's names do. */
function namesOf(jobs: Job[]): { names?: string } {
  const models = jobs.map((one) => modelOf(one).replaceAll(",", " ").slice(0, MOST_OF_A_NAME));
  if (new Set(models).size < 2) return {};
  const isTwice = (model: string) => models.indexOf(model) !== models.lastIndexOf(model);
  return { names: models.map((model, index) => (isTwice(model) ? `${model} ${shortened(jobs[index]!.id)}` : model)).join(",") };
}

/** The comparison of `ids`, two or more; `listed` spares requests for their jobs. */
function useComparison(ids: string[], listed: Job[]) {
  const [found, setFound] = useState<{ asked: string; jobs: Job[]; result: Result } | null>(null);
  const [refused, setRefused] = useState<{ asked: string; error: ApiError } | null>(null);
  const [tries, setTries] = useState(0);
  const asked = ids.join();
  useEffect(() => {
    if (ids.length < 2) return;
    const leaving = new AbortController();
    setRefused(null);
    compared(ids, listed, leaving.signal).then(
      (found) => setFound({ asked, ...found }),
      (failure) => void (isAbort(failure) || setRefused({ asked, error: asApiError(failure) })),
    );
    return () => leaving.abort();
  }, [asked, tries]);
  const error = refused?.asked === asked ? refused.error : null;
  const { jobs = null, result = null } = found?.asked === asked && !error ? found : {};
  return { jobs, result, error, again: () => setTries((before) => before + 1) };
}

async function compared(ids: string[], listed: Job[], signal: AbortSignal): Promise<{ jobs: Job[]; result: Result }> {
  const unknown = ids.find((id) => !isId(id));
  if (unknown !== undefined) throw noSuchJob(unknown);
  const known = (id: string) => listed.find((one) => one.id === id) ?? json<Job>(`jobs/${id}`, { signal });
  const jobs = await Promise.all(ids.map(known));
  return { jobs, result: await json<Result>(pathOf(ids, "figures.json", namesOf(jobs)), { signal }) };
}
