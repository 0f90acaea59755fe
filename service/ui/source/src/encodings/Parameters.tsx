// Controls of one encoding: a slider for every number with limits, a list for names, a switch for yes and no.
import { Field, Input, Select } from "../controls";
import { atStep, kindOf, LAST_STEP, type MethodInfo, type Range, type Schema, sorted, stepOf } from "./schema";

type Values = Record<string, string>;
type Props = {
  info: MethodInfo;
  values: Values;
  /** The encoding as it takes effect: values of parameters that are left to the server. */
  effective: Record<string, unknown> | undefined;
  errors: Map<string, string>;
  highest: number;
  order: string[];
  set: (values: Values) => void;
};

export function Parameters({ info, values, effective, errors, highest, order, set }: Props) {
  const { first, others } = sorted(info, order);
  const one = ([name, schema]: [string, Schema]) => (
    <Parameter
      key={name} name={name} schema={schema} value={values[name] ?? ""} error={errors.get(name)} highest={highest}
      effective={effective?.[name] ?? schema.default} set={(value) => set({ ...values, [name]: value })}
    />
  );
  return (
    <div class="parameters-form">
      {first.map(one)}
      {others.length > 0 && (
        <details open={others.some(([name]) => values[name] || errors.get(name))}>
          <summary>More parameters</summary>
          {others.map(one)}
        </details>
      )}
    </div>
  );
}

type One = { name: string; schema: Schema; value: string; effective: unknown; error: string | undefined; highest: number; set: (value: string) => void };

function Parameter({ name, schema, value, effective, error, highest, set }: One) {
  const { range, values, isSwitch } = kindOf(schema);
  const hint = schema.description;
  const shown = effective === null || effective === undefined ? "" : typeof effective === "object" ? JSON.stringify(effective) : String(effective);
  if (isSwitch || values) {
    const options: [string, string][] = [["", `as by default${shown && `: ${shown}`}`], ...(values ?? ["true", "false"]).map((text): [string, string] => [text, text])];
    return <Select label={name} value={value} set={set} hint={hint} error={error} options={options} />;
  }
  if (!range || name === "rope_theta")
    return <Input label={name} value={value} set={set} hint={hint} error={error} placeholder={shown.slice(0, 60)} />;
  const limits = { ...range, high: Math.min(range.high, Math.max(highest, range.low + 1)) };
  return <Slider name={name} value={value} shown={shown} range={limits} whole={range} hint={hint} error={error} set={set} />;
}

type SliderProps = { name: string; value: string; shown: string; range: Range; whole: Range; hint: string | undefined; error: string | undefined; set: (value: string) => void };

/** The slider ends where figures would show nothing new; the field beside it takes the full range. */
function Slider({ name, value, shown, range, whole, hint, error, set }: SliderProps) {
  const number = Number(value || shown || range.low);
  const limits = `${whole.low} to ${whole.high.toLocaleString("en")}`;
  const isUnset = !value && !shown;
  return (
    <Field label={name} hint={`${hint ? `${hint} ` : ""}From ${limits}.${isUnset ? " Not set: move the slider to set it." : ""}`} error={error}>
      {(control) => (
        <div class={isUnset ? "slider unset" : "slider"}>
          <input
            type="range" min={0} max={LAST_STEP} aria-label={`${name}, slider`}
            aria-valuetext={isUnset ? "none" : String(number)} value={stepOf(range, Math.min(Math.max(number, range.low), range.high))}
            onInput={(event) => set(String(atStep(range, Number(event.currentTarget.value))))}
          />
          <input {...control} inputMode="decimal" autocomplete="off" value={value} placeholder={shown || "none"}
            onInput={(event) => set(event.currentTarget.value)} />
        </div>
      )}
    </Field>
  );
}
