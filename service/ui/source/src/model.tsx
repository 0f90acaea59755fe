// The model of a part of the page: a choice, the name of the only one, or a refusal of one that is not served.
import type { ComponentType } from "preact";
import { Field, Select } from "./controls";
import type { Method, Model } from "./types";
import { type Settings, useSettings } from "./view";

const NAME = "model";

type Choice = { models: Model[]; value: string; set: (id: string) => void; error: string | undefined };

export function ModelChoice({ models, value, set, error }: Choice) {
  const options = models.map((one): [string, string] => [one.id, one.id]);
  if (models.length > 1 || models[0]!.id !== value)
    return <Select label="Model" name={NAME} value={value} set={set} error={error} options={options} />;
  return <Field label="Model" error={error}>{(control) => <input {...control} name={NAME} value={value} readOnly />}</Field>;
}

type Kept<S> = { settings: S; change: (change: Partial<S>) => void };
export type OfModel<S> = Kept<S> & { models: Model[]; methods: Method[]; model: Model };

/**
 * A part of the page for the model that its settings name. A link may name one that is not served: no other stands in
 * for it. `Always` is below the part, with or without a model. The settings `atFirst` are for the first model.
 */
export function forModel<S extends Settings & { model: string }>(
  tab: string,
  atFirst: (model: Model) => S,
  Part: ComponentType<OfModel<S>>,
  Always?: ComponentType<Kept<S>>,
) {
  return function WithModel({ models, methods }: { models: Model[]; methods: Method[] }) {
    const names = models.map((one) => one.id);
    const [settings, change] = useSettings<S>(tab, atFirst(models[0]!), { model: names });
    const kept = { settings, change };
    const id = settings.model;
    const model = id ? models.find((one) => one.id === id) : models[0]!;
    const choose = (model: string) => {
      change({ model } as Partial<S>);
      requestAnimationFrame(() => document.querySelector<HTMLElement>(`main > :not([hidden]) [name=${NAME}]`)?.focus());
    };
    const error = `${id} is not served here: choose ${names.join(" or ")}`;
    return (
      <>
        {model
          ? <Part {...kept} models={models} methods={methods} model={model} />
          : <div class="unserved"><ModelChoice models={models} value={id} set={choose} error={error} /></div>}
        {Always && <Always {...kept} />}
      </>
    );
  };
}
