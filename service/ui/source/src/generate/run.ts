// One prompt under several encodings: the stream of POST /generate, sorted into columns.
import { type ApiError, asApiError, events, isAbort } from "../api";
import type { PrefillProgress, ResultEnd, TextDelta, TokenLogprob } from "../types";

/** Text that arrived as one, and its tokens: several where one character takes them all. */
export type Word = { text: string; tokens: TokenLogprob[] };

export type Column = {
  pe: string;
  state: "waiting" | "reading" | "writing" | "done" | "stopped";
  words: Word[];
  /** Tokens whose text has not arrived. */
  pending: TokenLogprob[];
  read: PrefillProgress | null;
  firstS: number | null;
  lastS: number;
  end: ResultEnd | null;
};

export const ALTERNATIVES = 5;

export function emptyColumns(pe: string[]): Column[] {
  const empty = { state: "waiting" as const, read: null, firstS: null, lastS: 0, end: null };
  return pe.map((text) => ({ pe: text, words: [], pending: [], ...empty }));
}

export function tokensOf(column: Column): number {
  return column.words.reduce((sum, word) => sum + word.tokens.length, column.pending.length);
}

/** Fill `columns` from the stream; `arrived` is called after every event. Returns the failure, if there is one. */
export async function run(
  body: Record<string, unknown>,
  columns: Column[],
  signal: AbortSignal,
  arrived: () => void,
): Promise<ApiError | null> {
  const began = performance.now();
  const elapsed = () => (performance.now() - began) / 1000;
  let failure: ApiError | null = null;
  try {
    const sent = { ...body, logprobs: ALTERNATIVES, stream: true };
    for await (const [name, data] of events("generate", { body: sent, signal })) {
      const column = columns[data.index];
      if (!column) continue;
      if (name === "progress") progress(column, data);
      else if ("finish_reason" in data) finish(column, data);
      else write(column, data, elapsed());
      arrived();
    }
  } catch (error) {
    if (!isAbort(error)) failure = asApiError(error);
  }
  for (const column of columns) if (column.state !== "done") column.state = "stopped";
  return failure;
}

function progress(column: Column, data: PrefillProgress): void {
  column.state = "reading";
  column.read = data;
}

function finish(column: Column, end: ResultEnd): void {
  column.state = "done";
  column.end = { ...end };
  delete (column.end as { logprobs?: unknown }).logprobs; // the words have them
}

function write(column: Column, delta: TextDelta, now: number): void {
  column.state = "writing";
  column.firstS ??= now;
  column.lastS = now;
  const tokens = [...column.pending, ...(delta.logprobs ?? [])];
  column.pending = [];
  if (!delta.text) column.pending = tokens;
  else if (tokens.length > 1 && tokens.map((token) => token.token).join("") === delta.text)
    for (const token of tokens) column.words.push({ text: token.token, tokens: [token] });
  else column.words.push({ text: delta.text, tokens });
}

/** Seconds to the first token and tokens per second: the server's own at the end, the page's until then. */
export function speed(column: Column): { firstS: number | null; perSecond: number | null } {
  const tokens = tokensOf(column);
  if (column.end) {
    const { queue_s, prefill_s, decode_s } = column.end.timings;
    const later = column.end.usage.completion_tokens - 1;
    return { firstS: queue_s + prefill_s, perSecond: later > 0 && decode_s > 0 ? later / decode_s : null };
  }
  const wrote = column.firstS === null ? 0 : column.lastS - column.firstS;
  return { firstS: column.firstS, perSecond: tokens > 1 && wrote > 0 ? (tokens - 1) / wrote : null };
}
