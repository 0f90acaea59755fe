// Use it: an encoding in the words of clients and of other systems, copied with one click.
import { useEffect, useState } from "preact/hooks";
import { access, ApiError, asApiError, byField, isAbort, json } from "../api";
import { Copy, CopyLink, Input, numberOf, Problem } from "../controls";
import { forModel, ModelChoice, type OfModel } from "../model";
import { Prose } from "../prose";
import { snippets, TARGETS } from "./snippets";

export const TAB = "use";
const AT_FIRST = { model: "", pe: "yarn:4", length: "" };

type Exported = {
  target: string; version: string; documentation: string; length: number; exact: boolean; changes: boolean;
  config: Record<string, unknown>; usage: string; apply: string; differences: string[];
};
type Answer = { target: string; exported: Exported | null; error: ApiError | null };

export const Use = forModel(TAB, () => AT_FIRST, Exports);

function Exports({ models, model, settings, change }: OfModel<typeof AT_FIRST>) {
  const { answers, problem, again } = useExports({ pe: settings.pe, model: model.id, length: numberOf(settings.length) });
  const errors = problem ? byField(problem, ["pe", "length", "model"]) : null;
  return (
    <div>
      <div class="row">
        <Input label="Encoding" value={settings.pe} list="methods" set={(pe) => change({ pe })} error={errors?.get("pe")} />
        <Input label="Longest text, tokens" number value={settings.length} placeholder={errors?.get("length") ? "" : "by the encoding"}
          set={(length) => change({ length })} error={errors?.get("length")} />
        <ModelChoice models={models} value={model.id} set={(id) => change({ model: id })} error={errors?.get("model")} />
      </div>
      <div class="actions"><CopyLink /></div>
      <Problem text={errors?.get("")} again={again} />
      {!errors?.get("pe") && (
        <>
          <h3 class="title">With this server</h3>
          <div class="cards">
            {snippets(settings.pe, model.id, Boolean(access.key)).map((one) => <Card key={one.name} title={one.name} text={one.text} />)}
          </div>
        </>
      )}
      {answers.length > 0 && <h3 class="title">With other systems</h3>}
      <div class="cards">{answers.map((one) => <Export key={one.target} answer={one} />)}</div>
    </div>
  );
}

function Card({ title, text }: { title: string; text: string }) {
  return (
    <section class="card" aria-label={title}>
      <div class="card-head"><h4>{title}</h4><Copy label="Copy" text={() => text} /></div>
      <pre tabIndex={0}>{text}</pre>
    </section>
  );
}

function Export({ answer }: { answer: Answer }) {
  const { target, exported, error } = answer;
  if (!exported)
    return (
      <section class="card" aria-label={target}>
        <div class="card-head"><h4>{target}</h4></div>
        <p class="hint"><Prose text={error?.message.replace(/^pe: /, "") ?? ""} /></p>
      </section>
    );
  const config = JSON.stringify(exported.config, null, 2);
  const names = Object.keys(exported.config);
  /** The line is nothing without entries that it does not carry: they come first. */
  const isApart = names.some((name) => !exported.usage.includes(name));
  const entries = (
    <>
      <pre tabIndex={0}>{config}</pre>
      <Copy label="Copy the entries" text={() => config} />
    </>
  );
  return (
    <section class="card" aria-label={target}>
      <div class="card-head">
        <h4>{target} {exported.version}</h4>
        {!isApart && <Copy label="Copy" text={() => exported.usage} />}
      </div>
      {isApart && (
        <div class="entries">
          <p>First, the entries of <code>config.json</code>:</p>
          {entries}
          <p>Then the command:</p>
        </div>
      )}
      <pre tabIndex={0}>{exported.usage}</pre>
      {isApart && <Copy label="Copy the command" text={() => exported.usage} />}
      <p class="hint">{exported.changes ? <Prose text={exported.apply} /> : "The checkpoint's own encoding: nothing changes."}</p>
      {!isApart && names.length > 0 && (
        <details>
          <summary>Entries of config.json</summary>
          {entries}
        </details>
      )}
      {exported.differences.map((text) => <p class="hint" key={text}>Differs: <Prose text={text} /></p>)}
    </section>
  );
}

/** The encoding for every system. A fault of the request is one problem; systems that cannot express it say so. */
function useExports(body: { pe: string; model: string; length: unknown }) {
  const [answers, setAnswers] = useState<Answer[]>([]);
  const [problem, setProblem] = useState<ApiError | null>(null);
  const [tries, setTries] = useState(0);
  useEffect(() => {
    const leaving = new AbortController();
    const one = async (target: string): Promise<Answer> => {
      try {
        return { target, exported: await json<Exported>("export", { body: { ...body, target }, signal: leaving.signal }), error: null };
      } catch (failure) {
        const error = isAbort(failure) ? new ApiError(0, "aborted") : asApiError(failure);
        return { target, exported: null, error };
      }
    };
    const ask = async () => {
      const found = await Promise.all(TARGETS.map(one));
      if (leaving.signal.aborted) return;
      const wrong = found.find((answer) => answer.error && answer.error.code !== "not_expressible");
      setProblem(wrong?.error ?? null);
      setAnswers(wrong ? [] : found);
    };
    const timer = setTimeout(ask, 300);
    return () => {
      clearTimeout(timer);
      leaving.abort();
    };
  }, [JSON.stringify(body), tries]);
  const failed = problem && (problem.status === 0 || problem.status >= 500);
  return { answers, problem, again: failed ? () => setTries((before) => before + 1) : undefined };
}
