// How far does it read? A text, a target length, a curve that grows, recall beside it, and a verdict.
import { useEffect, useState } from "preact/hooks";
import { type ApiError, asApiError, byField, isAbort } from "../api";
import { CopyLink, count, Field, focusWrong, Input, numberOf, Problem, seconds, Select } from "../controls";
import { JobView } from "../jobs/JobView";
import { forModel, ModelChoice, type OfModel } from "../model";
import type { Model } from "../types";
import { TARGETS } from "../use/snippets";
import { answered, bodies, type Body, encodingsOf, FIGURES, pace, problemOf, type Size, sizeOf, stretched, timed, TITLES, usualTarget, usualWindows, windowsProblem } from "./bodies";
import { forgetKey, isPending, keyOf } from "./pending";

export const TAB = "reach";
const OWN = "own";
/** As the server has it unless ROPEWAY_MAX_TEXT_BYTES is set; a test compares. */
const MOST_CHARACTERS = 2 ** 21;
const MOST_BYTES_EACH = 4;
const TEXTS: [string, string][] = [
  ["persuasion", "Persuasion, a novel by Jane Austen"],
  ["python-reference", "The reference of the Python language"],
  [OWN, "A text of yours"],
];

const AT_FIRST = {
  model: "",
  text: "persuasion",
  own: "",
  target: "",
  windows: "",
  system: "",
  jobs: [] as string[],
  detached: [] as string[],
};
const SYSTEMS: [string, string][] = [["", "this server"], ...TARGETS.map((name): [string, string] => [name, name])];

type Settings = typeof AT_FIRST & { methods: string };

const atFirst = (model: Model): Settings => ({ ...AT_FIRST, methods: stretched(model).join(" ") });

export const Reach = forModel(TAB, atFirst, Measuring, Measured);

function Measuring({ models, model, settings, change }: OfModel<Settings>) {
  const methods = encodingsOf(settings.methods);
  const input = settings.text === OWN ? settings.own : settings.text;
  const target = numberOf(settings.target);
  const windows = numberOf(settings.windows);
  const length = target ?? usualTarget(model);
  const problem = problemOf(length);
  const unfit = problem ? undefined : windowsProblem(windows, Number(length));
  const wanted = problem || unfit ? [] : bodies(model, methods, { length: Number(length), input, system: settings.system, windows: windows as number | undefined });
  const { size, counting, left, error, time, again } = useSize(model, wanted);
  const { failure, starting, start } = useStart(wanted, (jobs) => change({ jobs, detached: [] }));
  const shown = failure ?? error;
  const errors = shown ? byField(shown, ["methods", "lengths", "length", "input", "model", "target"]) : null;
  const targetError = problem ?? errors?.get("lengths") ?? errors?.get("length");
  /** A refused field would be refused again, after the jobs before it have begun. */
  const isWrong = problem !== undefined || unfit !== undefined || (!failure && errors !== null && [...errors.keys()].some(Boolean));
  const retry = shown && isWithoutAnswer(shown) ? (failure ? start : again) : undefined;

  return (
    <div class="reach">
      <form
        onSubmit={(event) => {
          event.preventDefault();
          if (isWrong) focusWrong(event.currentTarget);
          else start();
        }}
      >
        <div class="row">
          <Select label="Text" value={settings.text} set={(text) => change({ text })} options={TEXTS}
            error={settings.text === OWN ? undefined : errors?.get("input")} />
          <Input label="Target length, tokens" number value={settings.target} placeholder={count(usualTarget(model))}
            hint={`The model was trained on ${count(model.trained_length)}`} set={(target) => change({ target })}
            error={targetError?.replace(/^\d+: /, "")} />
          <Input label="Windows of the text" number value={settings.windows} placeholder={count(usualWindows(Number(length)))}
            hint="More tell near encodings apart" set={(windows) => change({ windows })} error={unfit} />
          <Select label="Recommend for" value={settings.system} set={(system) => change({ system })} options={SYSTEMS}
            hint="Only encodings that it has" error={errors?.get("target")} />
          <ModelChoice models={models} value={model.id} set={(id) => change({ model: id })} error={errors?.get("model")} />
        </div>
        {settings.text === OWN && <Own text={settings.own} error={errors?.get("input")} set={(own) => change({ own })} />}
        <Input label="Encodings" value={settings.methods} error={errors?.get("methods")}
          hint="Short forms with spaces between them" set={(text) => change({ methods: text })} />
        <div class="actions">
          <button type="submit" class="main" disabled={starting > 0}>Measure</button>
          <CopyLink />
          {starting ? <Starting number={starting} of={wanted.length} /> : <Estimate size={size} counting={counting} left={left} time={time} />}
        </div>
        <Problem text={errors?.get("")} again={retry} />
      </form>
    </div>
  );
}

/** The jobs that a link names: they are shown without its model too. */
function Measured({ settings, change }: Pick<OfModel<Settings>, "settings" | "change">) {
  return (
    <>
      {settings.jobs.length > 0 && <p class="hint">The jobs go on without this page: close it, and open its link later.</p>}
      <div class="measured">
        {settings.jobs.map((entry) => {
          const [evaluation = "", id = ""] = entry.split(":");
          const others = settings.detached.filter((one) => one !== id);
          return (
            <JobView key={id} id={id} title={TITLES[evaluation] ?? evaluation} only={FIGURES[evaluation]}
              detached={settings.detached.includes(id)} detach={(it) => change({ detached: it ? [...others, id] : others })} />
          );
        })}
      </div>
    </>
  );
}

/** The text of a file, or why it is none. Others would stop the page for seconds, and the server would refuse them. */
async function textOf(file: File): Promise<{ text: string; problem?: string }> {
  const long = { text: "", problem: `${file.name} is too long: a text may have ${count(MOST_CHARACTERS)} characters.` };
  if (file.size > MOST_BYTES_EACH * MOST_CHARACTERS) return long;
  try {
    const text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
    if (text.includes("\0")) throw new TypeError("binary");
    return text.length > MOST_CHARACTERS ? long : { text };
  } catch {
    return { text: "", problem: `${file.name} is not a text in UTF-8.` };
  }
}

/** True where the same request may succeed: the server is away or fails. */
function isWithoutAnswer({ status }: ApiError): boolean {
  return status === 0 || status >= 500;
}

function Starting({ number, of }: { number: number; of: number }) {
  return <span class="hint" role="status">Starting job {number} of {of}: counting its tokens</span>;
}

/**
 * Starts the jobs one after the other: `started` gets all so far each time. A refusal is forgotten when the bodies change.
 * A start that a reload or a lost connection broke off goes on by its key, and no job is made twice.
 */
function useStart(wanted: Body[], started: (jobs: string[]) => void) {
  const [failure, setFailure] = useState<ApiError | null>(null);
  const [starting, setStarting] = useState(0);
  useEffect(() => setFailure(null), [JSON.stringify(wanted)]);
  const start = async () => {
    setFailure(null);
    const jobs: string[] = [];
    const key = keyOf(wanted);
    try {
      for (const body of wanted) {
        setStarting(jobs.length + 1);
        const headers = { "Idempotency-Key": `${key}-${body.evaluation}` };
        jobs.push(`${body.evaluation}:${(await answered<{ id: string }>("jobs", body, { headers })).id}`);
        started([...jobs]);
      }
      forgetKey();
    } catch (failure) {
      const refused = asApiError(failure);
      if (!isWithoutAnswer(refused)) forgetKey();
      setFailure(refused);
    }
    setStarting(0);
  };
  useEffect(() => void (isPending(wanted) && start()), []);
  return { failure, starting, start };
}

function Own({ text, error, set }: { text: string; error: string | undefined; set: (text: string) => void }) {
  const [problem, setProblem] = useState<string | undefined>();
  const read = async (files: FileList | null) => {
    if (!files?.[0]) return;
    const found = await textOf(files[0]);
    setProblem(found.problem);
    if (!found.problem) set(found.text);
  };
  return (
    <>
      <Field label="Your text" error={error} hint="Type it, paste it, or drop a file here. It stays in this browser until you measure.">
        {(control) => (
          <textarea
            {...control} dir="auto" rows={6} value={text}
            onInput={(event) => set(event.currentTarget.value)}
            onDragOver={(event) => event.preventDefault()}
            onDrop={(event) => {
              if (!event.dataTransfer?.files.length) return;
              event.preventDefault();
              read(event.dataTransfer.files);
            }}
          />
        )}
      </Field>
      <Field label="Or choose a text file" error={problem}>
        {(control) => <input {...control} type="file" accept="text/*,.md,.txt" onChange={(event) => read(event.currentTarget.files)} />}
      </Field>
    </>
  );
}

type Estimated = { size: Size | null; counting: boolean; left: number | null | "timing"; time: () => void };

function Estimate({ size, counting, left, time }: Estimated) {
  if (!size) return counting ? <span class="hint" role="status">Counting the tokens to read</span> : null;
  return (
    <span class="hint" role="status">
      {count(size.tokens)} tokens in at most {count(size.units)} units
      {left === "timing" ? ", timing a small one" : left === null ? " " : `, about ${seconds(left)}; finished units are not measured again`}
      {left === null && <button type="button" class="quiet" onClick={time}>Estimate the time</button>}
    </span>
  );
}

/** Size of the jobs as the controls are, and the seconds that they will take; unknown before the first measurement. */
function useSize(model: Model, wanted: Body[]) {
  const [found, setFound] = useState<{ asked: string; sizes: Size[] } | null>(null);
  const [refused, setRefused] = useState<{ asked: string; error: ApiError } | null>(null);
  const [paces, setPaces] = useState<Record<string, number>>({});
  const [timing, setTiming] = useState(false);
  const [tries, setTries] = useState(0);
  const asked = JSON.stringify(wanted);
  /** Answers to what was wanted before are none. */
  const sizes = wanted.length && found?.asked === asked ? found.sizes : null;
  const error = refused?.asked === asked ? refused.error : null;
  useEffect(() => void pace(model.id).then(setPaces, () => {}), [model.id]);
  useEffect(() => {
    const leaving = new AbortController();
    setRefused(null);
    if (!wanted.length) return;
    const ask = () =>
      Promise.all(wanted.map((body) => sizeOf(body, leaving.signal))).then(
        (sizes) => {
          setFound({ asked, sizes });
          setRefused(null);
        },
        (failure) => {
          if (isAbort(failure)) return;
          setFound(null);
          setRefused({ asked, error: asApiError(failure) });
        },
      );
    const timer = setTimeout(ask, 400);
    return () => {
      clearTimeout(timer);
      leaving.abort();
    };
  }, [asked, tries]);
  const known = wanted.every((body) => body.evaluation in paces);
  const left = timing ? "timing" : sizes && known ? sizes.reduce((sum, size, i) => sum + size.tokens * paces[wanted[i]!.evaluation]!, 0) : null;
  const time = async () => {
    setTiming(true);
    try {
      for (const body of wanted) {
        if (body.evaluation in paces) continue;
        const perToken = await timed(body);
        setPaces((before) => ({ ...before, [body.evaluation]: perToken }));
      }
    } catch (failure) {
      setRefused({ asked, error: asApiError(failure) });
    }
    setTiming(false);
  };
  const size = sizes && { units: total(sizes, "units"), tokens: total(sizes, "tokens") };
  const counting = wanted.length > 0 && !sizes && !error;
  return { size, counting, left: left as number | null | "timing", error, time, again: () => setTries((before) => before + 1) };
}

function total(sizes: Size[], name: keyof Size): number {
  return sizes.reduce((sum, size) => sum + size[name], 0);
}
