// Sentences of the server: text between backticks is code.
const CODE = /`([^`]+)`/;

export function Prose({ text }: { text: string }) {
  return <>{text.split(CODE).map((part, index) => (index % 2 ? <code key={index}>{part}</code> : part))}</>;
}
