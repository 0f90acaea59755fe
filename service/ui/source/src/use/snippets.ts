// The same encoding in the words of clients: what is copied works as it is.
import { SERVER } from "../api";

export type Snippet = { name: string; text: string };

const PROMPT = "The import statement";
const MOST = 48;

/** A string in Python and JSON; both escape alike here. */
const quoted = (text: string) => JSON.stringify(text);
/** A text inside single quotes of a shell. */
const forShell = (text: string) => `'${text.replaceAll("'", `'\\''`)}'`;

export function snippets(pe: string, model: string, needsKey: boolean): Snippet[] {
  const server = SERVER.href.replace(/\/$/, "");
  const key = needsKey ? ` -H "Authorization: Bearer $ROPEWAY_API_KEY"` : "";
  const body = JSON.stringify({ prompt: PROMPT, pe, model, max_new_tokens: MOST });
  const openaiKey = needsKey ? `os.environ["ROPEWAY_API_KEY"]` : `"none"`;
  const isObject = pe.trim().startsWith("{");
  const alias = `${model}@${pe}`;
  /** An alias takes short forms alone. */
  const named = isObject ? `model=${quoted(model)}` : `model=${quoted(alias)}`;
  const extra = isObject ? `, extra_body={"pe": ${quoted(pe)}}` : "";
  return [
    { name: "curl", text: `curl -s ${server}/generate -H 'Content-Type: application/json'${key} -d ${forShell(body)}` },
    {
      name: "Python client",
      text: `from service.client import Ropeway

with Ropeway(${quoted(server)}) as client:
    answer = client.generate(${quoted(PROMPT)}, pe=${quoted(pe)}, model=${quoted(model)}, max_new_tokens=${MOST})
    print(answer.results[0].text)`,
    },
    {
      name: "openai client",
      text: `${needsKey ? "import os\n\n" : ""}from openai import OpenAI

client = OpenAI(base_url=${quoted(`${server}/v1`)}, api_key=${openaiKey})
answer = client.completions.create(${named}, prompt=${quoted(PROMPT)}, max_tokens=${MOST}, temperature=0${extra})
print(answer.choices[0].text)`,
    },
    ...(isObject ? [] : [{ name: "Model alias, for any OpenAI client", text: alias }]),
  ];
}

/** Systems that ``POST /export`` writes for; a test compares. */
export const TARGETS = ["transformers", "vllm", "sglang", "llama.cpp", "exllamav3", "tgi"];
