// One prompt, two to four encodings side by side, streaming together.
import { useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";
import { type ApiError, byField } from "../api";
import { CopyLink, count, Field, focusWrong, Input, numberOf, Problem } from "../controls";
import { forModel, ModelChoice, type OfModel } from "../model";
import type { Model } from "../types";
import { store, stored } from "../view";
import { Answer } from "./Answer";
import { type Asked, differences, isSame, type Name, NUMBERS } from "./asked";
import { compared, EXAMPLES, passkey, tokens } from "./examples";
import { type Column, emptyColumns, run } from "./run";
import { CLASSES } from "./words";

export const TAB = "generate";
const KEPT = "ropeway.answers";
/** The second click of a double click lands on "Stop". */
const DOUBLE_CLICK_MS = 500;
const MOST_COLUMNS = 4;
const FULL = "At most four side by side: remove one to add another.";
const TOO_MANY = "At most four side by side: remove this one or another.";

const NUMBERS_AT_FIRST = { max_new_tokens: "48", temperature: "0", seed: "" };

type Phase = "idle" | "waiting" | "writing" | "stopped";
/** Of a run without a token. The answers below are those before it, if there are any. */
const HINTS: Partial<Record<Phase, string>> = { waiting: "Waiting for the first token", stopped: "Stopped before the first token" };

type Kept = { asked: Asked & { promptTokens: number | null }; columns: Column[] };
type Run = Kept & { version?: number };

type Settings = { model: string; prompt: string; pe: string[] } & typeof NUMBERS_AT_FIRST;

const atFirst = (model: Model): Settings => ({
  model: "",
  prompt: EXAMPLES[0]!.prompt,
  pe: compared(model),
  ...NUMBERS_AT_FIRST,
});

export const Generate = forModel(TAB, atFirst, Prompted);

function Prompted({ models, model, settings, change }: OfModel<Settings>) {
  const { answers, sent, phase, error, start, stop } = useRun();
  const running = phase === "waiting" || phase === "writing";
  const promptTokens = useTokens(model, settings.prompt);
  const [max_new_tokens, temperature, seed] = NUMBERS.map((name) => numberOf(settings[name]));
  const asked: Asked = { prompt: settings.prompt, pe: settings.pe, model: model.id, max_new_tokens, temperature, seed };
  const places = sent?.pe.map((_, index) => `pe.${index}`) ?? [];
  const errors = error ? byField(error, ["prompt", "model", ...NUMBERS, ...places]) : null;
  /** Errors go with the values that were sent, here and in `others`: they may have been corrected since. */
  const errorOf = (name: Name, ...others: Name[]) =>
    sent && [name, ...others].every((one) => isSame(one, sent, asked)) ? errors?.get(name) : undefined;
  /** So do those of encodings, whose place may be another one now. */
  const errorOfPe = (pe: string, index: number) =>
    index >= MOST_COLUMNS ? TOO_MANY : errors?.get(`pe.${sent?.pe.indexOf(pe)}`);

  const form = useRef<HTMLFormElement>(null);
  useEffect(() => {
    if (error) focusWrong(form.current);
  }, [error]);
  const seedProblem = problemOfSeed(settings.seed);
  const ask = () => {
    if (seedProblem || settings.pe.length > MOST_COLUMNS) focusWrong(form.current);
    else start(asked, promptTokens);
  };
  return (
    <form
      ref={form}
      class="generate"
      onSubmit={(event) => {
        event.preventDefault();
        running ? stop() : ask();
      }}
    >
      <Prompt model={model} prompt={settings.prompt} tokens={promptTokens} ask={ask}
        error={errorOf("prompt", "max_new_tokens", "model")} set={(prompt) => change({ prompt })} />
      <Encodings pe={settings.pe} errorOf={errorOfPe} set={(pe) => change({ pe })} />
      <div class="row">
        <ModelChoice models={models} value={model.id} set={(id) => change({ model: id })} error={errorOf("model")} />
        <Input label="Most new tokens" number value={settings.max_new_tokens} error={errorOf("max_new_tokens")}
          set={(max_new_tokens) => change({ max_new_tokens })} />
        <Input label="Temperature" hint="0 takes the most likely token" number value={settings.temperature}
          error={errorOf("temperature")} set={(temperature) => change({ temperature })} />
        <Input label="Seed" number value={settings.seed} placeholder="none" error={seedProblem ?? errorOf("seed")}
          set={(seed) => change({ seed })} />
      </div>
      <div class="actions">
        <button type="submit" class="main">{running ? "Stop" : "Generate"}</button>
        <CopyLink />
        <span class="hint" role="status">{HINTS[phase] ?? "Ctrl + Enter in the prompt starts it too."}</span>
      </div>
      <Problem text={errors?.get("")} again={error && (error.status === 0 || error.status >= 500) ? ask : undefined} />
      {answers && <Answers kept={answers} models={models} others={differences(answers.asked, asked)} />}
    </form>
  );
}

/** JavaScript rounds larger whole numbers: the answers would be those of another seed. */
function problemOfSeed(text: string): string | undefined {
  const seed = numberOf(text);
  const isRounded = typeof seed === "number" && Math.abs(seed) > Number.MAX_SAFE_INTEGER;
  return isRounded ? `must be at most ${count(Number.MAX_SAFE_INTEGER)} on this page, not ${text.trim()}` : undefined;
}

/** The answers; `others` are settings of theirs that the controls no longer have. */
function Answers({ kept, models, others }: { kept: Run; models: Model[]; others: string }) {
  const trained = (column: Column) =>
    models.find((one) => one.id === (column.end?.model ?? kept.asked.model))?.trained_length ?? 0;
  return (
    <section aria-label="Answers" class={others ? "stale" : ""}>
      <p class="note" role="status">{others && `These answers are of other settings: ${others}`}</p>
      <p class="legend">
        Probability of each token:{" "}
        {CLASSES.map((one) => <span key={one.name} class={one.name}>{one.label}</span>)}
        <span class="hint">Point at a token, or tap it, for its alternatives.</span>
      </p>
      <div class="columns" style={{ "--columns": kept.columns.length }}>
        {kept.columns.map((column, index) => (
          <Answer key={index} number={index + 1} column={column} version={kept.version ?? 0}
            promptTokens={kept.asked.promptTokens} trained={trained(column)} />
        ))}
      </div>
    </section>
  );
}

function Prompt(props: {
  model: Model;
  prompt: string;
  tokens: number | null;
  error: string | undefined;
  set: (prompt: string) => void;
  ask: () => void;
}) {
  const { model, prompt, tokens: length, error, set, ask } = props;
  const [problem, setProblem] = useState("");
  const long = () => passkey(model).then(set, (failure: Error) => setProblem(failure.message));
  return (
    <>
      <Field label="Prompt" error={error} hint={lengthText(length, model)}>
        {(control) => (
          <textarea
            {...control}
            dir="auto"
            rows={5}
            value={prompt}
            onInput={(event) => set(event.currentTarget.value)}
            onKeyDown={(event) => {
              if (event.key !== "Enter" || !(event.ctrlKey || event.metaKey)) return;
              event.preventDefault();
              ask();
            }}
          />
        )}
      </Field>
      <div class="chips" role="group" aria-label="Examples">
        <span>Examples:</span>
        {EXAMPLES.map((one) => (
          <button type="button" key={one.name} onClick={() => set(one.prompt)}>{one.name}</button>
        ))}
        <button type="button" onClick={long}>A passkey beyond the trained length</button>
      </div>
      <Problem text={problem} />
    </>
  );
}

function lengthText(length: number | null, model: Model): string {
  const trained = `the model was trained on ${count(model.trained_length)} and takes ${count(model.max_length)}`;
  if (length === null) return `Tokens: ${trained}`;
  const times = length / model.trained_length;
  return `${count(length)} ${length === 1 ? "token" : "tokens"}${times > 1 ? `, ${times.toFixed(1)} times the trained length` : ""}; ${trained}`;
}

function Encodings(props: {
  pe: string[];
  errorOf: (pe: string, index: number) => string | undefined;
  set: (pe: string[]) => void;
}) {
  const { pe, errorOf, set } = props;
  const isFull = pe.length >= MOST_COLUMNS;
  const place = useRef<HTMLFieldSetElement>(null);
  /** A button that was pressed may be gone or disabled: the focus goes to this field. */
  const next = useRef<number | null>(null);
  useLayoutEffect(() => { // not a frame later: by then the user may type into another field
    if (next.current !== null) place.current?.querySelectorAll("input")[next.current]?.focus();
    next.current = null;
  });
  const add = () => {
    next.current = pe.length;
    set([...pe, "default"]);
  };
  const remove = (index: number) => {
    next.current = Math.min(index, pe.length - 2);
    set(pe.toSpliced(index, 1));
  };
  return (
    <fieldset ref={place}>
      <legend>Encodings</legend>
      <div class="columns" style={{ "--columns": Math.min(pe.length, MOST_COLUMNS) }}>
        {pe.map((text, index) => (
          <div class="with-button" key={index}>
            <Input label={`Encoding ${index + 1}`} value={text} list="methods" error={errorOf(text, index)}
              set={(value) => set(pe.with(index, value))} />
            {pe.length > 1 && (
              <button type="button" class="quiet" aria-label={`Remove encoding ${index + 1}`} title="Remove"
                onClick={() => remove(index)}>✕</button>
            )}
          </div>
        ))}
      </div>
      <div class="chips">
        <button type="button" disabled={isFull} title={isFull ? FULL : undefined} onClick={add}>
          Add an encoding
        </button>
        {isFull && <span class="hint">{FULL}</span>}
        <span class="hint">A short form such as <code>yarn:4</code> or <code>self_extend:group_size=4</code>.</span>
      </div>
    </fieldset>
  );
}

/** Number of tokens of the prompt, counted by the server when the typing pauses. */
function useTokens(model: Model, prompt: string): number | null {
  const [found, setFound] = useState<number | null>(null);
  useEffect(() => {
    setFound(null);
    if (!prompt) return;
    const leaving = new AbortController();
    const ask = () => tokens(model, prompt, leaving.signal).then(setFound, () => {});
    const timer = setTimeout(ask, 300);
    return () => {
      clearTimeout(timer);
      leaving.abort();
    };
  }, [model.id, prompt]);
  return found;
}

/** The run in progress, or the last one of this session: its answers outlive a reload, and a run without any. */
function useRun() {
  const [kept, setKept] = useState<Run | null>(() => stored(sessionStorage, KEPT));
  const [error, setError] = useState<ApiError | null>(null);
  const [sent, setSent] = useState<Asked | null>(null);
  const leaving = useRef<AbortController | null>(null);
  const [phase, setPhase] = useState<Phase>("idle");
  const began = useRef(0);
  /** The last answers of which anything arrived: a refusal shows them again. */
  const latest = useRef<Kept | null>(kept);
  useEffect(() => {
    const keep = () => latest.current && store(sessionStorage, KEPT, interrupted(latest.current));
    addEventListener("pagehide", keep);
    return () => {
      removeEventListener("pagehide", keep);
      leaving.current?.abort();
      keep();
    };
  }, []);

  const start = async (asked: Asked, promptTokens: number | null) => {
    leaving.current?.abort();
    const controller = (leaving.current = new AbortController());
    const shown: Kept = { asked: { ...asked, promptTokens }, columns: emptyColumns(asked.pe) };
    let version = 0;
    let frame = 0;
    const draw = () => {
      frame = 0;
      setKept({ ...(latest.current ?? shown), version: ++version });
    };
    const arrived = () => {
      latest.current = shown;
      setPhase("writing");
      frame ||= requestAnimationFrame(draw);
    };
    setError(null);
    setSent(asked);
    setPhase("waiting");
    began.current = performance.now();
    draw();
    const failure = await run(asked, shown.columns, controller.signal, arrived);
    if (leaving.current !== controller) return;
    cancelAnimationFrame(frame);
    latest.current || !failure ? draw() : setKept(null);
    store(sessionStorage, KEPT, latest.current);
    setError(failure);
    setPhase(controller.signal.aborted && latest.current !== shown ? "stopped" : "idle");
  };
  const stop = () => {
    if (performance.now() - began.current > DOUBLE_CLICK_MS) leaving.current?.abort();
  };
  return { answers: kept, sent, phase, error, start, stop };
}

/** The answers as a reload leaves them. */
function interrupted({ asked, columns }: Kept): Kept {
  const ended = columns.map((one) => (one.state === "done" ? one : { ...one, state: "stopped" as const }));
  return { asked, columns: ended };
}
