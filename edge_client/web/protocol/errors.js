// The error of bytes or values that break a rule of PROTOCOL.md.

/** Bytes or values that break a rule; `code` is one of PROTOCOL.md, section 13. */
export class Malformed extends Error {
  constructor(code, message) {
    super(`${code}: ${message}`);
    this.name = "Malformed";
    this.code = code;
    this.detail = message;
  }
}

/** A received value as text of at most 80 characters, for an error message. */
export function shown(value) {
  let text;
  try {
    text = typeof value === "string" ? JSON.stringify(value.slice(0, 80)) : String(JSON.stringify(value));
  } catch {
    text = String(value);
  }
  return text.slice(0, 80);
}
