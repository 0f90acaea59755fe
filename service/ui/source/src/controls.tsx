// Controls with their labels, and errors in words below the control that caused them.
import { type ComponentChildren, Fragment } from "preact";
import { useId, useState } from "preact/hooks";
import { Prose } from "./prose";
import { isWithoutText } from "./view";

const SAID_MS = 3000;
/** The words of the server's errors for its list of methods; a test compares. */
export const LISTED_BY = "GET /methods or `ropeway methods`";

/** The same for several encodings in place of one; a test compares. */
export const GIVE_SEVERAL = "give several as a list, in the shell by repeating --pe";

type Described = { id: string; "aria-describedby"?: string; "aria-invalid"?: boolean };

/** A labelled control. `children` gets the attributes that tie it to its label, hint and error. */
export function Field(props: {
  label: ComponentChildren;
  hint?: ComponentChildren;
  error?: string | undefined;
  class?: string;
  children: (control: Described) => ComponentChildren;
}) {
  const id = useId();
  const notes = [props.hint && `${id}-hint`, props.error && `${id}-error`].filter(Boolean).join(" ");
  const control: Described = { id, ...(notes && { "aria-describedby": notes }), "aria-invalid": Boolean(props.error) };
  return (
    <div class={`field ${props.class ?? ""}`}>
      <label for={id}>{props.label}</label>
      {props.children(control)}
      {props.hint && <p class="hint" id={`${id}-hint`}>{typeof props.hint === "string" ? <Prose text={props.hint} /> : props.hint}</p>}
      {props.error && <p class="error" id={`${id}-error`}><Refused text={props.error} /></p>}
    </div>
  );
}

/** An error in words. The page has its own list of methods. */
function Refused({ text }: { text: string }) {
  return (
    <>
      {text.replace(GIVE_SEVERAL, "give one in each field").split(LISTED_BY).map((part, index) => (
        <Fragment key={index}>{index > 0 && <a href="#encodings">Encodings</a>}<Prose text={part} /></Fragment>
      ))}
    </>
  );
}

export function Input(props: {
  label: ComponentChildren;
  value: string;
  set: (value: string) => void;
  hint?: ComponentChildren;
  error?: string | undefined;
  list?: string;
  number?: boolean;
  placeholder?: string;
  class?: string;
}) {
  const { label, value, set, hint, error, list, number, placeholder } = props;
  return (
    <Field label={label} hint={hint} error={error} class={props.class ?? ""}>
      {(control) => (
        <input
          {...control}
          value={value}
          list={list}
          placeholder={placeholder}
          inputMode={number ? "decimal" : "text"}
          spellcheck={false}
          autocomplete="off"
          autocapitalize="off"
          onInput={(event) => set(event.currentTarget.value)}
        />
      )}
    </Field>
  );
}

/** A value that is none of the options, as links may have, is shown as one more. */
export function Select(props: {
  label: string;
  name?: string;
  value: string;
  set: (value: string) => void;
  options: [value: string, text: string][];
  hint?: ComponentChildren;
  error?: string | undefined;
}) {
  const isOther = props.options.every(([value]) => value !== props.value);
  return (
    <Field label={props.label} hint={props.hint} error={props.error}>
      {(control) => (
        <select {...control} name={props.name} value={props.value} onChange={(event) => props.set(event.currentTarget.value)}>
          {isOther && <option>{props.value}</option>}
          {props.options.map(([value, text]) => <option value={value} key={value}>{text}</option>)}
        </select>
      )}
    </Field>
  );
}

/** A button that copies, and says so. */
export function Copy(props: { text: () => string; label: string; said?: () => string }) {
  const [said, say] = useState("");
  const copy = async () => {
    const copied = props.said?.() ?? "Copied";
    try {
      await navigator.clipboard.writeText(props.text());
      say(copied);
    } catch {
      say(copiedBySelection(props.text()) ? copied : "Your browser does not allow copying");
    }
    setTimeout(() => say(""), SAID_MS);
  };
  return (
    <button type="button" class="quiet" onClick={copy}>
      <span aria-live="polite">{said || props.label}</span>
    </button>
  );
}

/** The address of the open tab with its settings, copied. */
export function CopyLink() {
  const said = () => (isWithoutText(location.href) ? "Copied without the text, which is too long for a link" : "Copied");
  return <Copy label="Copy link" text={() => location.href} said={said} />;
}

/** Without https, browsers offer only the old way. */
function copiedBySelection(text: string): boolean {
  const area = document.createElement("textarea");
  area.value = text;
  document.body.append(area);
  area.select();
  const done = document.execCommand("copy");
  area.remove();
  return done;
}

/** Focus the first field of `form` that has an error. */
export function focusWrong(form: HTMLElement | null): void {
  form?.querySelector<HTMLElement>("[aria-invalid=true]")?.focus();
}

/** A failure that belongs to no control. */
export function Problem(props: { text: string | undefined; again?: (() => void) | undefined }) {
  if (!props.text) return null;
  return (
    <p class="problem" role="alert">
      <Prose text={props.text} />{" "}
      {props.again && <button type="button" class="quiet" onClick={props.again}>Try again</button>}
    </p>
  );
}

const WITH_COMMAS = /^\d{1,3}(,\d{3})+(\.\d+)?$/;

/** A number as it was typed; the text itself where it is none, such as "0,7", so that the server names the error. */
export function numberOf(text: string): number | string | undefined {
  const typed = text.trim();
  if (typed === "") return undefined;
  const value = Number(WITH_COMMAS.test(typed) ? typed.replaceAll(",", "") : typed);
  return Number.isFinite(value) ? value : text;
}

export function seconds(value: number): string {
  if (value < 10) return `${value.toFixed(2)} s`;
  if (value < 90) return `${Math.round(value)} s`;
  return value < 5400 ? `${Math.round(value / 60)} min` : `${(value / 3600).toFixed(1)} h`;
}

export function count(value: number): string {
  return value.toLocaleString("en");
}
