// A picker of encodings: questions, families, parameters, and live figures of the loaded model beside them.
import { useEffect, useState } from "preact/hooks";
import { type ApiError, asApiError, byField, isAbort, json } from "../api";
import { Copy, CopyLink, count, Field, Input, LISTED_BY, numberOf, Problem } from "../controls";
import { Figures, type Pictures } from "../figures";
import { TAB as GENERATE } from "../generate/Generate";
import { forModel, ModelChoice, type OfModel } from "../model";
import { Prose } from "../prose";
import type { Method, Pe } from "../types";
import { linkTo } from "../view";
import { Parameters } from "./Parameters";
import { type MethodInfo, pairs, shortForm, unpaired } from "./schema";

export const TAB = "encodings";

type Drawn = Pictures & { trained_length: number; length: number; encodings: { label: string; model: string; pe: Pe }[] };

const AT_FIRST = {
  model: "",
  question: "",
  method: "yarn",
  parameters: ["factor=4"],
  other: "",
  otherParameters: [] as string[],
  length: "",
};

export const Encodings = forModel(TAB, () => AT_FIRST, Picker);

function Picker({ models, methods, model, settings, change }: OfModel<typeof AT_FIRST>) {
  const chosen = { method: settings.method, values: unpaired(settings.parameters) };
  const other = settings.other ? { method: settings.other, values: unpaired(settings.otherParameters) } : null;
  const pe = [chosen, ...(other ? [other] : [])].map((one) => shortForm(one.method, one.values));
  const { drawn, error, drawing, again } = useFigures({ pe, model: model.id, length: numberOf(settings.length) });
  const errors = error ? byField(error, ["pe.0", "pe.1", "length", "model"]) : null;
  const highest = 16 * model.trained_length;
  return (
    <div class="picker">
      <div class="choices">
        <Questions methods={methods} question={settings.question} set={(question) => change({ question })} />
        <Chosen
          label="Method" methods={methods} question={settings.question} chosen={chosen} error={errors?.get("pe.0")}
          effective={drawn?.encodings[0]?.pe} highest={highest} none={false}
          set={(method, values) => change({ method, parameters: pairs(values) })}
        />
        <Chosen
          label="Compared with" methods={methods} question="" chosen={other ?? { method: "", values: {} }} none
          error={errors?.get("pe.1")} effective={drawn?.encodings[1]?.pe} highest={highest}
          set={(method, values) => change({ other: method, otherParameters: pairs(values) })}
        />
        <div class="row">
          <ModelChoice models={models} value={model.id} set={(id) => change({ model: id })} error={errors?.get("model")} />
          <Input label="Length of the text, tokens" number value={settings.length} error={errors?.get("length")}
            placeholder={count(4 * model.trained_length)} set={(length) => change({ length })} />
        </div>
        <div class="actions">
          <code class="short">{pe[0]}</code>
          <Copy label="Copy" text={() => pe[0]!} />
          <a href={linkTo(GENERATE, { model: model.id, pe: ["default", ...pe] })}>
            Generate with it
          </a>
          <CopyLink />
        </div>
      </div>
      <div class="shown" aria-busy={Boolean(drawn) && drawing}>
        {drawn && error && <p class="note" role="status">These figures are those before the error.</p>}
        <Problem text={errors?.get("")} again={error && (error.status === 0 || error.status >= 500) ? again : undefined} />
        {!drawn && !error && <p role="status">Drawing the first figures</p>}
        {!drawn && error && !errors?.get("") && <p class="hint" role="status">The figures come once the error is mended.</p>}
        {drawn && <div class={error ? "stale" : ""}><Figures pictures={drawn} /></div>}
      </div>
    </div>
  );
}

function Questions(props: { methods: Method[]; question: string; set: (question: string) => void }) {
  const questions = [...new Set(props.methods.flatMap((one) => one.questions))];
  return (
    <div class="chips" role="group" aria-label="Questions">
      {["", ...questions].map((one) => (
        <button type="button" key={one} aria-pressed={one === props.question} onClick={() => props.set(one)}>
          {one || "All methods"}
        </button>
      ))}
    </div>
  );
}

type Choice = { method: string; values: Record<string, string> };

function Chosen(props: {
  label: string;
  methods: Method[];
  question: string;
  chosen: Choice;
  none: boolean;
  error: string | undefined;
  effective: Pe | undefined;
  highest: number;
  set: (method: string, values: Record<string, string>) => void;
}) {
  const { label, methods, question, chosen, none, error, effective, highest, set } = props;
  const info = useInfo(chosen.method, effective);
  const fitting = methods.filter((one) => !question || one.questions.includes(question) || one.method === chosen.method);
  const own = effective?.method === chosen.method ? effective : undefined; // it may be of the method before
  const kinds = [...new Set(fitting.map((one) => one.kind))];
  const isUnknown = Boolean(chosen.method) && fitting.every((one) => one.method !== chosen.method);
  const names = (methods.find((one) => one.method === chosen.method)?.parameters ?? []).map((one) => one.name);
  // Errors of the method itself, and of parameters without a control, stand below the method.
  const problems = byField({ message: error?.replace(/^method: /, "").replace(`see ${LISTED_BY}`, "choose one of this list") ?? "", param: "" } as ApiError, info ? names : []);
  const start = (method: string) => set(method, startOf(methods.find((one) => one.method === method)));
  return (
    <section class="chosen" aria-label={label}>
      <Field label={label} hint={info?.summary} error={problems.get("") || undefined}>
        {(control) => (
          <select {...control} value={chosen.method} onChange={(event) => start(event.currentTarget.value)}>
            {none && <option value="">nothing</option>}
            {isUnknown && <option value={chosen.method}>{chosen.method}</option>}
            {kinds.map((kind) => (
              <optgroup key={kind} label={kind}>
                {fitting.filter((one) => one.kind === kind).map((one) => <option key={one.method}>{one.method}</option>)}
              </optgroup>
            ))}
          </select>
        )}
      </Field>
      {info && (
        <>
          <Parameters info={info} values={chosen.values} effective={own} errors={problems} highest={highest}
            order={names} set={(values) => set(chosen.method, values)} />
          <About info={info} />
        </>
      )}
    </section>
  );
}

/** A factor has no neutral value that shows anything: it begins at 4. */
function startOf(method: Method | undefined): Record<string, string> {
  return method?.parameters.some((one) => one.name === "factor" && one.default === null) ? { factor: "4" } : {};
}

function About({ info }: { info: MethodInfo }) {
  const rows: [string, string][] = [
    ["For", info.use], ["Not for", info.avoid], ["Reach, L0 the trained length", info.reach],
    ["Without tuning", info.training_free], ["Evidence", info.evidence], ["Cost", info.cost],
  ];
  return (
    <>
      <dl class="about">
        <div><dt>Formula</dt><dd><Prose text={info.formula} /></dd></div>
        <div><dt>Paper</dt><dd><Paper text={info.paper} /></dd></div>
      </dl>
      <details>
        <summary>Use, reach, evidence, cost</summary>
        <dl class="about">{rows.map(([name, text]) => <div key={name}><dt>{name}</dt><dd><Prose text={text} /></dd></div>)}</dl>
      </details>
    </>
  );
}

/** arXiv numbers become links; nothing is loaded from there. */
function Paper({ text }: { text: string }) {
  return (
    <>
      {text.split(/(arXiv:\d{4}\.\d{4,5})/).map((part) =>
        part.startsWith("arXiv:") ? <a key={part} rel="noreferrer" href={`https://arxiv.org/abs/${part.slice(6)}`}>{part}</a> : part,
      )}
    </>
  );
}

const infos = new Map<string, MethodInfo>();

/** What a method is. Asked again with the `figures` of another try, after the server was away. */
function useInfo(method: string, figures: unknown): MethodInfo | null {
  const [, redraw] = useState(0);
  useEffect(() => {
    if (!method || infos.has(method)) return;
    json<MethodInfo>(`methods/${encodeURIComponent(method)}`).then(
      (info) => {
        infos.set(method, info);
        redraw((version) => version + 1);
      },
      () => {}, // the figures of the same method show the error
    );
  }, [method, figures]);
  return infos.get(method) ?? null;
}

/** Figures of the request, asked for when the controls rest; the last ones stay until then. */
function useFigures(body: { pe: string[]; model: string; length: unknown }) {
  const [drawn, setDrawn] = useState<Drawn | null>(null);
  const [refused, setRefused] = useState<{ asked: string; error: ApiError } | null>(null);
  const [drawing, setDrawing] = useState(true);
  const [tries, setTries] = useState(0);
  const wanted = JSON.stringify(body);
  useEffect(() => {
    const leaving = new AbortController();
    setDrawing(true);
    const ask = async () => {
      try {
        setDrawn(await json<Drawn>("figures", { body, signal: leaving.signal }));
        setRefused(null);
      } catch (failure) {
        if (isAbort(failure)) return;
        setRefused({ asked: wanted, error: asApiError(failure) });
      }
      setDrawing(false);
    };
    const timer = setTimeout(ask, drawn ? 200 : 0);
    return () => {
      clearTimeout(timer);
      leaving.abort();
    };
  }, [wanted, tries]);
  /** The error of a request that is wanted no more is none. */
  const error = refused?.asked === wanted ? refused.error : null;
  return { drawn, error, drawing, again: () => setTries((before) => before + 1) };
}
