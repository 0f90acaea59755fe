// The model of a part of the page: a choice, the name of the only one, or a refusal of one that is not served.
import type { ComponentChildren } from "preact";
import { Field, Select } from "./controls";
import type { Model } from "./types";

type Choice = { models: Model[]; value: string; set: (id: string) => void; error: string | undefined };

export function ModelChoice({ models, value, set, error }: Choice) {
  if (models.length > 1 || models[0]!.id !== value)
    return <Select label="Model" value={value} set={set} error={error} options={models.map((one) => [one.id, one.id])} />;
  return <Field label="Model" error={error}>{(control) => <input {...control} value={value} readOnly />}</Field>;
}

/** A part for the model that its settings name. Links may name one that is not served: no other stands in for it. */
export function ForModel(props: {
  models: Model[];
  id: string;
  set: (id: string) => void;
  children: (model: Model) => ComponentChildren;
}) {
  const { models, id, set, children } = props;
  const model = id ? models.find((one) => one.id === id) : models[0]!;
  if (model) return <>{children(model)}</>;
  const error = `${id} is not served here: choose ${models.map((one) => one.id).join(" or ")}`;
  return <div class="unserved"><ModelChoice models={models} value={id} set={set} error={error} /></div>;
}
