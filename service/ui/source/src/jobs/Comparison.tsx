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
/** Of a job's id: the server names jobs of one model by it. */
const NAME_CHARS = 8;
const FILES: [name: string, text: string, options?: Record<string, string>][] = [
  ["results.csv", "CSV"],
  ["plot.png", "PNG"],
  ["plot.svg", "SVG"],
  ["report.html", "Report, HTML", { standalone: "true" }],
];

type Props = {
  /** Methods of the others are compared with those of the same name in the first. */
  ids: string[];
  /** Their descriptions, as far as they are in the list. */
  listed: Job[];
  clear: () => void;
};

export function Comparison({ ids, listed, clear }: Props) {
  const { result, error, again } = useComparison(ids);
  const [failure, setFailure] = useState<{ error: ApiError; again: () => void } | null>(null);
  const isComparing = ids.length > 1 && !result && !error;
  useEffect(() => setFailure(null), [ids.join()]);
  return (
    <section class="job comparison" aria-label="Comparison" aria-busy={isComparing}>
      <h3 class="title">Comparison</h3>
      <ol>{ids.map((id) => <li key={id}><Chosen id={id} job={listed.find((one) => one.id === id)} /></li>)}</ol>
      {ids.length < 2 && <p class="hint" role="status">Choose another job of this evaluation. Its encodings are compared with the same ones of the first job.</p>}
      <Problem text={error?.message.replace(/^jobs: /, "")} again={error && !isFinal(error) ? again : undefined} />
      <Problem text={failure?.error.message} again={failure?.again} />
      <div class="chips">
        <button type="button" onClick={clear}>End the comparison</button>
        {result && FILES.map(([file, text, options]) => (
          <Download key={file} path={pathOf(ids, file, options)} text={text}
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

function pathOf(ids: string[], file: string, options: Record<string, string> = {}): string {
  const query = new URLSearchParams(options).toString();
  return `comparisons/${ids.join(",")}/${file}${query && `?${query}`}`;
}

/** The comparison of `ids`, if there are two or more. */
function useComparison(ids: string[]) {
  const [found, setFound] = useState<{ asked: string; result: Result } | null>(null);
  const [refused, setRefused] = useState<{ asked: string; error: ApiError } | null>(null);
  const [tries, setTries] = useState(0);
  const asked = ids.join();
  useEffect(() => {
    if (ids.length < 2) return;
    const leaving = new AbortController();
    setRefused(null);
    compared(ids, leaving.signal).then(
      (result) => setFound({ asked, result }),
      (failure) => void (isAbort(failure) || setRefused({ asked, error: asApiError(failure) })),
    );
    return () => leaving.abort();
  }, [asked, tries]);
  const error = refused?.asked === asked ? refused.error : null;
  const result = found?.asked === asked && !error ? found.result : null;
  return { result, error, again: () => setTries((before) => before + 1) };
}

async function compared(ids: string[], signal: AbortSignal): Promise<Result> {
  const unknown = ids.find((id) => !isId(id));
  if (unknown !== undefined) throw noSuchJob(unknown);
  return json<Result>(pathOf(ids, "figures.json"), { signal });
}
