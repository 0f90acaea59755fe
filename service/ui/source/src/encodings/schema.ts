// Parameters of a method from its JSON schema, and the short form that they make.
export type Schema = {
  type?: string;
  minimum?: number;
  maximum?: number;
  exclusiveMinimum?: number;
  exclusiveMaximum?: number;
  enum?: string[];
  const?: unknown;
  anyOf?: Schema[];
  description?: string;
  default?: unknown;
};

export type MethodInfo = {
  method: string;
  summary: string;
  formula: string;
  use: string;
  avoid: string;
  reach: string;
  training_free: string;
  evidence: string;
  paper: string;
  cost: string;
  parameters: { properties: Record<string, Schema>; required?: string[] };
};

/** A number with both bounds: it gets a slider. `whole` numbers have steps of one. */
export type Range = { low: number; high: number; whole: boolean };

const SHARED = ["method", "attention_temperature", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings", "base"];
const FIRST = 3;
const STEPS = 200;
const SMALLEST = 1e-3;

export function kindOf(schema: Schema): { range?: Range; values?: string[]; isSwitch: boolean } {
  const kinds = (schema.anyOf ?? [schema]).filter((one) => one.type !== "null");
  const number = kinds.find((one) => one.type === "number" || one.type === "integer");
  const low = number?.minimum ?? number?.exclusiveMinimum;
  const high = number?.maximum ?? number?.exclusiveMaximum;
  const range = low === undefined || high === undefined ? undefined : { low, high, whole: number!.type === "integer" };
  const values = kinds.flatMap((one) => one.enum ?? (typeof one.const === "string" ? [one.const] : []));
  const found = { isSwitch: kinds.some((one) => one.type === "boolean"), ...(range && { range }) };
  return values.length && !range ? { ...found, values } : found;
}

/** The first parameters of the method's own, in the order of `order`, and all others. */
export function sorted(info: MethodInfo, order: string[]): { first: [string, Schema][]; others: [string, Schema][] } {
  const all = order.flatMap((name): [string, Schema][] => {
    const schema = info.parameters.properties[name];
    return schema ? [[name, schema]] : [];
  });
  const first = all.filter(([name]) => !SHARED.includes(name)).slice(0, FIRST);
  return { first, others: all.filter((one) => !first.includes(one)) };
}

/** Sliders are logarithmic, since most parameters are factors or lengths. */
export function atStep(range: Range, step: number): number {
  const { low, high, whole } = range;
  const from = Math.max(low, whole ? 1 : SMALLEST);
  if (step <= 0) return low;
  const value = from * (high / from) ** (step / STEPS);
  return Math.min(high, whole ? Math.round(value) : Number(value.toPrecision(3)));
}

export function stepOf(range: Range, value: number): number {
  const from = Math.max(range.low, range.whole ? 1 : SMALLEST);
  if (value <= from) return value > range.low ? 1 : 0;
  return Math.round((STEPS * Math.log(value / from)) / Math.log(range.high / from));
}

export const LAST_STEP = STEPS;

/** `yarn:factor=4`; an encoding with commas goes into parentheses. */
export function shortForm(method: string, values: Record<string, string>): string {
  const parts = Object.entries(values)
    .filter(([, value]) => value.trim() !== "")
    .map(([name, value]) => `${name}=${written(value)}`);
  return parts.length ? `${method}:${parts.join(",")}` : method;
}

/** A number with a comma, such as `2,5`, goes into quotation marks: the server's refusal then has it as it was typed. */
function written(value: string): string {
  if (!/[,=]/.test(value) || /^[([]/.test(value)) return value;
  return /^[-\d.,]+$/.test(value) ? JSON.stringify(value) : `(${value})`;
}

export function pairs(values: Record<string, string>): string[] {
  return Object.entries(values).filter(([, value]) => value !== "").map(([name, value]) => `${name}=${value}`);
}

export function unpaired(texts: string[]): Record<string, string> {
  return Object.fromEntries(texts.map((text) => [text.slice(0, text.indexOf("=")), text.slice(text.indexOf("=") + 1)]));
}
