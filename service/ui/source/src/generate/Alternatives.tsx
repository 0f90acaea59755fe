// The token below the pointer or the cursor: its probability and the alternatives.
import { visible } from "../text";
import type { Word } from "./run";

/** Exactly one of `top` and `bottom` is a place. */
export type Shown = { word: Word; left: string; top: string; bottom: string; maxWidth: string };

const percent = (logprob: number) => {
  const share = 100 * Math.exp(logprob);
  return share >= 0.01 ? `${share.toFixed(share < 1 ? 2 : 1)} %` : "below 0.01 %";
};

export function Alternatives({ shown }: { shown: Shown }) {
  const { word, ...style } = shown;
  return (
    <div class="alternatives" style={style} role="status">
      {word.tokens.map((token) => (
        <table key={token.token_id}>
          <caption>
            <code>{visible(token.token)}</code> {percent(token.logprob)}, log-probability {(token.logprob || 0).toFixed(2).replace(/^-0\.00$/, "0.00")}
          </caption>
          <tbody>
            {token.top.map((other) => (
              <tr key={other.token_id} class={other.token_id === token.token_id ? "chosen" : ""}>
                <th scope="row"><code>{visible(other.token)}</code></th>
                <td>{percent(other.logprob)}</td>
                <td>
                  <span class="bar" style={{ width: `${Math.max(1, 80 * Math.exp(other.logprob))}px` }} />
                  {other.token_id === token.token_id && " chosen"}
                </td>
              </tr>
            ))}
          </tbody>
        </table>
      ))}
      {word.tokens.length === 0 && <p>No log-probability came with this text.</p>}
    </div>
  );
}
