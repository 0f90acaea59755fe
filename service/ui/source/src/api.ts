// Requests to the server: the page uses the public HTTP API and nothing else.
import { createParser, type EventSourceMessage } from "eventsource-parser";

/** The server behind any prefix of a proxy: the page is one folder below it. */
export const SERVER = new URL("../", document.baseURI);
const KEY = "ropeway.key";

/** A refusal or a failure in the API's one shape; `status` is 0 where no answer came. */
export class ApiError extends Error {
  constructor(
    readonly status: number,
    message: string,
    readonly code: string | null = null,
    readonly param: string | null = null,
    readonly extra: Record<string, unknown> = {},
  ) {
    super(message);
  }
}

export const UNREACHABLE = "The server cannot be reached. Everything on this page is kept: try again when it is back.";
const BROKEN_OFF = "The connection ended before the answer did.";

/** The key of this session, and whether the server asked for one. */
export const access = {
  get key(): string {
    return sessionStorage.getItem(KEY) ?? "";
  },
  set key(value: string) {
    if (value) sessionStorage.setItem(KEY, value);
    else sessionStorage.removeItem(KEY);
  },
  /** Called on every answer 401. */
  refused: (): void => {},
};

export function address(path: string): string {
  return new URL(path.replace(/^\//, ""), SERVER).href;
}

export type Options = { body?: unknown; method?: string; signal?: AbortSignal; headers?: Record<string, string> };

/** The answer to a request. Raises ApiError for any refusal, and DOMException "AbortError" if `signal` aborts. */
export async function request(path: string, { body, method, signal, headers }: Options = {}): Promise<Response> {
  const sent = new Headers(headers);
  if (access.key) sent.set("Authorization", `Bearer ${access.key}`);
  if (body !== undefined) sent.set("Content-Type", "application/json");
  let answer: Response;
  try {
    answer = await fetch(address(path), {
      method: method ?? (body === undefined ? "GET" : "POST"),
      headers: sent,
      body: body === undefined ? null : JSON.stringify(body),
      signal: signal ?? null,
    });
  } catch (error) {
    throw isAbort(error) ? error : new ApiError(0, UNREACHABLE);
  }
  if (answer.ok) return answer;
  if (answer.status === 401) access.refused();
  throw await refusal(answer);
}

async function refusal(answer: Response): Promise<ApiError> {
  const text = await answer.text().catch(() => "");
  try {
    return inBody(answer.status, JSON.parse(text).error);
  } catch {
    return new ApiError(answer.status, `The server answered ${answer.status} ${answer.statusText}`.trim());
  }
}

type ErrorBody = { message: string; code: string | null; param: string | null };

function inBody(status: number, { message, code, param, ...extra }: ErrorBody): ApiError {
  return new ApiError(status, message, code, param, extra);
}

export async function json<T>(path: string, options: Options = {}): Promise<T> {
  return (await request(path, options)).json();
}

/** Events of a stream: name and JSON. It ends with `[DONE]`; an error event raises ApiError, a broken stream too. */
export async function* events(path: string, options: Options): AsyncGenerator<[string, any]> {
  const answer = await request(path, options);
  const arrived: EventSourceMessage[] = [];
  const parser = createParser({ onEvent: (event) => arrived.push(event) });
  const reader = answer.body!.pipeThrough(new TextDecoderStream()).getReader();
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) throw new ApiError(0, BROKEN_OFF);
      parser.feed(value);
      for (const event of arrived.splice(0)) {
        if (event.data === "[DONE]") return;
        const data = JSON.parse(event.data);
        if (!event.event && data.error) throw inBody(500, data.error);
        yield [event.event ?? "message", data];
      }
    }
  } catch (error) {
    throw error instanceof ApiError || isAbort(error) ? error : new ApiError(0, BROKEN_OFF);
  } finally {
    reader.cancel().catch(() => {});
  }
}

export function isAbort(error: unknown): boolean {
  return error instanceof DOMException && error.name === "AbortError";
}

export function asApiError(error: unknown): ApiError {
  if (error instanceof ApiError) return error;
  return new ApiError(0, error instanceof Error ? error.message : String(error));
}

/** Parts of a message by field, with or without "body" before it: "pe.1.factor: required; top_k: too large" has two. The key "" has the rest. */
export function byField(error: ApiError, fields: string[]): Map<string, string> {
  const found = new Map<string, string>();
  const add = (field: string, text: string) => found.set(field, found.has(field) ? `${found.get(field)}; ${text}` : text);
  let current = fields.find((field) => isPart(error.param ?? "", field)) ?? "";
  for (const part of error.message.split("; ")) {
    const [, name = "", rest = ""] = /^(?:body: )?([\w.-]+): (.*)$/s.exec(part) ?? [];
    const field = fields.find((candidate) => isPart(name, candidate));
    if (field === undefined) {
      add(current, part);
    } else {
      current = field;
      const inside = name.slice(field.length).replace(/^\./, "");
      add(field, inside ? `${inside}: ${rest}` : rest);
    }
  }
  return found;
}

function isPart(name: string, field: string): boolean {
  return name === field || name.startsWith(`${field}.`);
}
