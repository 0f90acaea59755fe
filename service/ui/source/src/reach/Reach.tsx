// How far does it read? A text, a target length, a curve that grows, recall beside it, and a verdict.
import { useEffect, useState } from "preact/hooks";
import { type ApiError, asApiError, byField, isAbort, json } from "../api";
import { Copy, count, Field, Input, numberOf, Problem, seconds, Select } from "../controls";
import { compared } from "../generate/examples";
import { JobView } from "../jobs/JobView";
import type { Method, Model } from "../types";
import { useSettings } from "../view";
import { bodies, type Body, FIGURES, pace, type Size, sizeOf, timed, TITLES } from "./bodies";

export const TAB = "reach";
const OWN = "own";
const TEXTS: [string, string][] = [
  ["persuasion", "Persuasion, a novel by Jane Austen"],
  ["python-reference", "The reference of the Python language"],
  [OWN, "A text of yours"],
];

export function Reach({ models }: { models: Model[]; methods: Method[] }) {
  const [settings, change] = useSettings(TAB, {
    model: "",
    text: "persuasion",
    own: "",
    target: "",
    methods: compared(models[0]!).join(" "),
    jobs: [] as string[],
    detached: [] as string[],
  });
  const model = models.find((one) => one.id === settings.model) ?? models[0]!;
  const methods = settings.methods.split(/\s+/).filter(Boolean);
  const input = settings.text === OWN ? settings.own : settings.text;
  const wanted = bodies(model, methods, numberOf(settings.target), input);
  const { size, left, error, time } = useSize(model, wanted);
  const [failure, setFailure] = useState<ApiError | null>(null);
  const [starting, setStarting] = useState(false);
  const errors = failure ?? error ? byField((failure ?? error)!, ["methods", "lengths", "length", "input", "model"]) : null;

  const start = async () => {
    setStarting(true);
    try {
      const jobs: string[] = [];
      for (const body of wanted) jobs.push(`${body.evaluation}:${(await json<{ id: string }>("jobs", { body })).id}`);
      setFailure(null);
      change({ jobs, detached: [] });
    } catch (refused) {
      setFailure(asApiError(refused));
    }
    setStarting(false);
  };
  return (
    <div class="reach">
      <form
        onSubmit={(event) => {
          event.preventDefault();
          start();
        }}
      >
        <div class="row">
          <Select label="Text" value={settings.text} set={(text) => change({ text })} options={TEXTS}
            error={settings.text === OWN ? undefined : errors?.get("input")} />
          <Input label="Target length, tokens" number value={settings.target} placeholder={count(4 * model.trained_length)}
            hint={`The model was trained on ${count(model.trained_length)}`} set={(target) => change({ target })}
            error={errors?.get("lengths") ?? errors?.get("length")} />
          {models.length > 1 && (
            <Select label="Model" value={model.id} set={(id) => change({ model: id })} error={errors?.get("model")}
              options={models.map((one) => [one.id, one.id])} />
          )}
        </div>
        {settings.text === OWN && <Own text={settings.own} error={errors?.get("input")} set={(own) => change({ own })} />}
        <Input label="Encodings" value={settings.methods} error={errors?.get("methods")?.replace(/^\d+/, (index) => methods[Number(index)] ?? index)}
          hint="Short forms with spaces between them" set={(text) => change({ methods: text })} />
        <div class="actions">
          <button type="submit" class="main" disabled={starting}>Measure</button>
          <Copy label="Copy link" text={() => location.href} />
          <Estimate size={size} left={left} time={time} />
        </div>
        <Problem text={errors?.get("")} />
      </form>
      {settings.jobs.length > 0 && <p class="hint">The jobs go on without this page: close it, and open its link later.</p>}
      <div class="measured">
        {settings.jobs.toReversed().map((entry) => {
          const [evaluation = "", id = ""] = entry.split(":");
          const others = settings.detached.filter((one) => one !== id);
          return (
            <JobView key={id} id={id} title={TITLES[evaluation] ?? evaluation} only={FIGURES[evaluation]}
              detached={settings.detached.includes(id)} detach={(it) => change({ detached: it ? [...others, id] : others })} />
          );
        })}
      </div>
    </div>
  );
}

function Own({ text, error, set }: { text: string; error: string | undefined; set: (text: string) => void }) {
  const read = (files: FileList | null | undefined) => files?.[0]?.text().then(set);
  return (
    <>
      <Field label="Your text" error={error} hint="Type it, paste it, or drop a file here. It stays in this browser until you measure.">
        {(control) => (
          <textarea
            {...control} rows={6} value={text}
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
      <Field label="Or choose a text file">
        {(control) => <input {...control} type="file" accept="text/*,.md,.txt" onChange={(event) => read(event.currentTarget.files)} />}
      </Field>
    </>
  );
}

function Estimate({ size, left, time }: { size: Size | null; left: number | null | "timing"; time: () => void }) {
  if (!size) return null;
  return (
    <span class="hint" role="status">
      {count(size.tokens)} tokens in at most {count(size.units)} units
      {left === "timing" ? ", timing a small one" : left === null ? " " : `, about ${seconds(left)}`}
      {left === null && <button type="button" class="quiet" onClick={time}>Estimate the time</button>}
    </span>
  );
}

/** Size of the jobs as the controls are, and the seconds that they will take; unknown before the first measurement. */
function useSize(model: Model, wanted: Body[]) {
  const [sizes, setSizes] = useState<Size[] | null>(null);
  const [error, setError] = useState<ApiError | null>(null);
  const [paces, setPaces] = useState<Record<string, number>>({});
  const [timing, setTiming] = useState(false);
  const asked = JSON.stringify(wanted);
  useEffect(() => void pace(model.id).then(setPaces, () => {}), [model.id]);
  useEffect(() => {
    const leaving = new AbortController();
    const ask = () =>
      Promise.all(wanted.map((body) => sizeOf(body, leaving.signal))).then(
        (found) => {
          setSizes(found);
          setError(null);
        },
        (failure) => {
          if (isAbort(failure)) return;
          setSizes(null);
          setError(asApiError(failure));
        },
      );
    const timer = setTimeout(ask, 400);
    return () => {
      clearTimeout(timer);
      leaving.abort();
    };
  }, [asked]);
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
      setError(asApiError(failure));
    }
    setTiming(false);
  };
  const size = sizes && { units: total(sizes, "units"), tokens: total(sizes, "tokens") };
  return { size, left: left as number | null | "timing", error, time };
}

function total(sizes: Size[], name: keyof Size): number {
  return sizes.reduce((sum, size) => sum + size[name], 0);
}
