// The jobs behind the question how far a model reads, their size, and how long they will take.
import { ApiError, json, type Options } from "../api";
import { count, GIVE_SEVERAL } from "../controls";
import { compared } from "../generate/examples";
import type { Job } from "../jobs/follow";
import type { Model } from "../types";

export type Body = { evaluation: string } & Record<string, unknown>;

/** Windows of a text that the encodings read, unless the page asks for another number: few do not separate near ones. */
const WINDOWS = 8;
const [LEAST_WINDOWS, MOST_WINDOWS] = [2, 256];
const SHORTEST = 64;
/** The server takes budgets below 2^24 tokens. */
const MOST_TOKENS = 2 ** 24 - 1;
const LONGEST = Math.floor(MOST_TOKENS / (2 * LEAST_WINDOWS));

/** The target length of a model that nobody has changed. */
export function usualTarget(model: Model): number {
  return Math.min(4 * model.trained_length, LONGEST);
}

/** The usual number of windows, or as many as a budget has room for. */
export function usualWindows(length: number): number {
  return Math.min(WINDOWS, mostWindows(length));
}

function mostWindows(length: number): number {
  return Math.max(LEAST_WINDOWS, Math.floor(MOST_TOKENS / (2 * length)));
}

/** The problem of a target length, if there is one: one message instead of one for each job. */
export function problemOf(target: number | string): string | undefined {
  return whole(target, SHORTEST, LONGEST);
}

/** The same of the number of windows of that length. */
export function windowsProblem(windows: number | string | undefined, length: number): string | undefined {
  return whole(windows, LEAST_WINDOWS, Math.min(MOST_WINDOWS, mostWindows(length)));
}

function whole(value: number | string | undefined, least: number, most: number): string | undefined {
  const fits = Number.isInteger(value) && Number(value) >= least && Number(value) <= most;
  return fits || value === undefined ? undefined : `must be a whole number from ${least} to ${count(most)}, not ${value}`;
}

/** A passkey and its frame need some 170 tokens. */
const SHORTEST_RECALL = 256;

/** Encodings to begin with. The own one of a model with a table is refused behind its end. */
export function stretched(model: Model): string[] {
  return compared(model).filter((one) => model.pe.method !== "learned" || one !== "default");
}

/** Chooses among encodings: the evaluations measure it, and a recommendation refuses it as a candidate. */
const AUTO = "auto";

/** `system` is the one to recommend for: this server if it is empty. */
type Wanted = { length: number; input: string; system: string; windows: number | undefined };

/** Perplexity of the same tokens at every length, recall of passkeys, and the recommendation, which needs a candidate. */
export function bodies(model: Model, methods: string[], { length, input, system, windows = usualWindows(length) }: Wanted): Body[] {
  const common = { model: model.id, methods };
  const lengths = doubling(model.trained_length, length);
  const recalled = lengths.filter((one) => one >= SHORTEST_RECALL || one === length);
  const candidates = methods.filter((one) => one.split(":")[0] !== AUTO);
  const target = system && { target: system };
  const recommend = { ...common, methods: candidates, length, input, windows, max_tokens: 2 * windows * length, ...target };
  return [
    { evaluation: "perplexity", ...common, lengths, input, protocol: "tail", max_tokens: windows * length },
    { evaluation: "passkey", ...common, lengths: recalled, depths: [0, 0.5, 1], samples: 2 },
    ...(candidates.length ? [{ evaluation: "recommend", ...recommend }] : []),
  ];
}

export const TITLES: Record<string, string> = {
  perplexity: "Perplexity", passkey: "Recall of passkeys", recommend: "Recommendation",
};

/** The figure of each job by length; the report has the others. */
export const FIGURES: Record<string, string> = {
  perplexity: "perplexity", passkey: "retrieval-by-length", recommend: "difference",
};

/** The trained length, twice that and so on, up to the target, which is the last. */
function doubling(trained: number, target: number): number[] {
  const lengths: number[] = [];
  for (let length = trained; length < target; length *= 2) lengths.push(length);
  return [...lengths, target];
}

export type Size = { units: number; tokens: number };

export function sizeOf(body: Body, signal: AbortSignal): Promise<Size> {
  return answered<Size>("jobs/plan", body, { signal });
}

/** The answer to `body`. A refusal has the encodings themselves instead of their places in the list. */
export async function answered<T>(path: string, body: Body, options: Options = {}): Promise<T> {
  try {
    return await json<T>(path, { ...options, body });
  } catch (failure) {
    if (!(failure instanceof ApiError)) throw failure;
    const methods = body.methods as string[];
    const message = failure.message.replace(
      /(^|; )methods\.(\d+)\.?([\w.-]*): /g,
      (_, before, place, inside) => `${before}methods: ${methods[place]}: ${inside && `${inside}: `}`,
    );
    throw new ApiError(failure.status, message.replace(GIVE_SEVERAL, "separate encodings by spaces"), failure.code, failure.param, failure.extra);
  }
}

/** Encodings as they are typed: spaces separate them, and commas with spaces do too. */
export function encodingsOf(text: string): string[] {
  return text.split(/,?\s+|,$/).filter(Boolean);
}

/** Seconds of measuring per token of each evaluation, by the units that finished jobs of the same model measured. */
export async function pace(model: string): Promise<Record<string, number>> {
  const { jobs } = await json<{ jobs: Job[] }>("jobs?state=done&limit=100");
  const found: Record<string, number> = {};
  for (const job of jobs) {
    const measured = job.tokens_done - job.tokens_reused;
    if (measured > 0 && job.seconds > 0 && (job.model ?? model) === model) found[job.evaluation] ??= job.seconds / measured;
  }
  return found;
}

/** The same after timing one small request of its kind. */
export async function timed(body: Body): Promise<number> {
  const { evaluation, ...fields } = body;
  const lengths = (fields.lengths as number[] | undefined)?.slice(0, 1);
  const small = { ...fields, methods: ["default"], ...(lengths && { lengths }), ...SMALL[evaluation] };
  const [size, result] = await Promise.all([
    json<Size>("jobs/plan", { body: { evaluation, ...small } }),
    json<{ seconds: number }>(evaluation, { body: small }),
  ]);
  return result.seconds / size.tokens;
}

const SMALL: Record<string, Record<string, unknown>> = {
  passkey: { depths: [0.5], samples: 1 },
  recommend: { windows: 2 },
};
