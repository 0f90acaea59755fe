// Answers of the API, as far as the page reads them.
export type Alternative = { token_id: number; token: string; logprob: number };
export type TokenLogprob = Alternative & { top: Alternative[] };
export type Pe = Record<string, unknown> & { method: string };

export type AutoChoice = { source: string; calibration: string | null; above: number; up_to: number | null };

export type ResultEnd = {
  index: number;
  model: string;
  finish_reason: string;
  usage: { prompt_tokens: number; completion_tokens: number };
  timings: { queue_s: number; prefill_s: number; decode_s: number };
  pe: Pe;
  auto: AutoChoice | null;
};
export type TextDelta = { index: number; text: string; token_ids: number[]; logprobs?: TokenLogprob[] };
export type PrefillProgress = { index: number; prompt_tokens_done: number; prompt_tokens_total: number };

export type Model = {
  id: string;
  default: boolean;
  parameters: number;
  trained_length: number;
  max_length: number;
  pe: Pe;
  variants: Record<string, string>;
};

export type Parameter = { name: string; type: string; required: boolean; default: unknown };
export type Method = {
  method: string;
  kind: string;
  family: string;
  summary: string;
  questions: string[];
  parameters: Parameter[];
};
