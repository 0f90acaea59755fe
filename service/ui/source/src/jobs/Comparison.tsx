// Several finished jobs of one evaluation beside each other: words, figures and files of the server's comparison.
import { useEffect, useState } from "preact/hooks";
import { type ApiError, asApiError, isAbort, json } from "../api";
import { Field, Problem, Select } from "../controls";
import { Figures } from "../figures";
import { Prose } from "../prose";
import { askedOf } from "./asked";
import { Download } from "./Download";
import { isFinal, isId, type Job, modelOf, noSuchJob, type Result } from "./follow";

/** Evaluations with a number for each method and length; a test compares this with the server's. */
export const COMPARABLE = ["perplexity", "long_perplexity", "passkey", "needle", "ruler"];
/** Jobs in one comparison, as on the server; a test compares. */
export const MOST_COMPARED = 8;
/** Of a job's id. */
const NAME_CHARS = 8;
const FILES: [name: string, text: string, options?: Record<string, string>][] = [
  ["results.csv", "CSV"],
  ["plot.png", "PNG"],
  ["plot.svg", "SVG"],
  ["report.html", "Report, HTML", { standalone: "true" }],
];

/** Of a name of a result, characters: eight fit into the server's limit. */
const MOST_NAME_CHARS = 100;

/** What is compared, and with what: a part of the tab's settings. */
export type Asked = {
  /** Ids of jobs. Methods of the others are compared with those of the same name in the first. */
  compare: string[];
  /** `id=name` for each result with a name. */
  names: string[];
  /** The method that all others are compared with instead, by its name in the comparison. */
  baseline: string;
};
type Props = {
  asked: Asked;
  change: (change: Partial<Asked>) => void;
  /** Descriptions of jobs, as far as they are in the list. */
  listed: Job[];
  clear: () => void;
};

export function Comparison({ asked, change, listed, clear }: Props) {
  const ids = asked.compare;
  const query = queryOf(asked);
  const { result, methods, defaults, error, again } = useComparison(ids, query);
  const [failure, setFailure] = useState<{ error: ApiError; again: () => void } | null>(null);
  const isComparing = ids.length > 1 && !result && !error;
  useEffect(() => setFailure(null), [pathOf(ids, "", query)]);
  return (
    <section class="job comparison" aria-label="Comparison" aria-busy={isComparing}>
      <h3 class="title">Comparison</h3>
      <ol>
        {ids.map((id) => (
          <li key={id}>
            <Chosen id={id} job={listed.find((one) => one.id === id)} />
            {ids.length > 1 && (
              <NameField label={`Name of ${shortened(id)}`} given={namesGiven(asked).get(id) ?? ""}
                other={defaults.get(id) ?? ""} set={(name) => change(named(asked, defaults, id, name))} />
            )}
          </li>
        ))}
      </ol>
      {ids.length > 1 && (
        <div class="row">
          <Select label="Compared with" value={asked.baseline} set={(baseline) => change({ baseline })}
            options={[["", "the same encoding of the first job"], ...methods.map((one): [string, string] => [one, one])]} />
        </div>
      )}
      {ids.length < 2 && <p class="hint" role="status">Choose another job of this evaluation. Its encodings are compared with the same ones of the first job.</p>}
      <Problem text={error?.message.replace(/^(jobs|names|baseline): /, "")} again={error && !isFinal(error) ? again : undefined} />
      <Problem text={failure?.error.message} again={failure?.again} />
      <div class="chips">
        <button type="button" onClick={clear}>End the comparison</button>
        {result && FILES.map(([file, text, options]) => (
          <Download key={file} path={pathOf(ids, file, { ...options, ...query })} text={text}
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

/** A name that takes effect when it is complete: each one is another comparison. Commas separate names. */
function NameField(props: { label: string; given: string; other: string; set: (name: string) => void }) {
  const [typed, type] = useState(props.given);
  useEffect(() => type(props.given), [props.given]);
  return (
    <Field label={props.label}>
      {(control) => (
        <input {...control} value={typed} placeholder={props.other} maxLength={MOST_NAME_CHARS} autocomplete="off"
          onInput={(event) => type(event.currentTarget.value.replaceAll(",", ""))} onChange={() => props.set(typed.trim())} />
      )}
    </Field>
  );
}

function shortened(id: string): string {
  return id.slice(0, NAME_CHARS);
}

function namesGiven({ names }: Asked): Map<string, string> {
  return new Map(names.map((one) => [one.slice(0, one.indexOf("=")), one.slice(one.indexOf("=") + 1)]));
}

/** An empty name is the server's default, and without any name all are. */
function queryOf(asked: Asked): Record<string, string> {
  const given = namesGiven(asked);
  const names = asked.compare.map((id) => given.get(id) ?? "");
  return {
    ...(names.some(Boolean) && { names: names.join(",") }),
    ...(asked.baseline && { baseline: asked.baseline }),
  };
}

/** The change that names a result, which is in the name of a baseline too. `defaults` are names by the server. */
function named(asked: Asked, defaults: Map<string, string>, id: string, name: string): Partial<Asked> {
  const others = asked.names.filter((one) => !one.startsWith(`${id}=`));
  const [before, now] = [namesGiven(asked).get(id), name].map((one) => ` (${one || defaults.get(id)})`) as [string, string];
  const { baseline } = asked;
  return {
    names: name ? [...others, `${id}=${name}`] : others,
    baseline: baseline.endsWith(before) ? baseline.slice(0, -before.length) + now : baseline,
  };
}

/** What stays of `asked` when other jobs are compared. With them, names that the server gives may change, and so a baseline. */
export function withJobs(asked: Asked, compare: string[]): Asked {
  const names = asked.names.filter((one) => compare.some((id) => one.startsWith(`${id}=`)));
  return { compare, names, baseline: "" };
}

function pathOf(ids: string[], file: string, options: Record<string, string> = {}): string {
  const query = new URLSearchParams(options).toString();
  return `comparisons/${ids.join(",")}/${file}${query && `?${query}`}`;
}

type Numbers = { methods: { name: string }[]; sources: { id: string; default_name: string }[] };
type Compared = { result: Result; methods: string[]; defaults: Map<string, string> };

/** The comparison of `ids`, if there are two or more. `methods` are the last ones that could be compared, and `defaults`
 *  the names that their results have by themselves, by id. */
function useComparison(ids: string[], query: Record<string, string>) {
  const [found, setFound] = useState<({ asked: string } & Compared) | null>(null);
  const [refused, setRefused] = useState<{ asked: string; error: ApiError } | null>(null);
  const [tries, setTries] = useState(0);
  const asked = pathOf(ids, "", query);
  useEffect(() => {
    if (ids.length < 2) return;
    const leaving = new AbortController();
    setRefused(null);
    compared(ids, query, leaving.signal).then(
      (one) => setFound({ asked, ...one }),
      (failure) => void (isAbort(failure) || setRefused({ asked, error: asApiError(failure) })),
    );
    return () => leaving.abort();
  }, [asked, tries]);
  const error = refused?.asked === asked ? refused.error : null;
  const result = found?.asked === asked && !error ? found.result : null;
  const { methods, defaults } = found ?? { methods: [], defaults: new Map<string, string>() };
  return { result, methods, defaults, error, again: () => setTries((before) => before + 1) };
}

async function compared(ids: string[], query: Record<string, string>, signal: AbortSignal): Promise<Compared> {
  const unknown = ids.find((id) => !isId(id));
  if (unknown !== undefined) throw noSuchJob(unknown);
  const [result, { methods, sources }] = await Promise.all([
    json<Result>(pathOf(ids, "figures.json", query), { signal }),
    json<Numbers>(pathOf(ids, "results.json", query), { signal }),
  ]);
  const defaults = new Map(sources.map((one) => [one.id, one.default_name]));
  return { result, methods: methods.map((one) => one.name), defaults };
}
