// The playground's request as a command and as a program, to be copied.

/** A body as JSON without what a reader does not need to repeat. */
function plain(body) {
  const { request_id, stream_options, ...rest } = body;
  return rest;
}

export function asCurl(body, hasKey) {
  const json = JSON.stringify(plain(body), null, 2).replaceAll("'", "'\\''");
  const key = hasKey ? ` \\\n  -H "Authorization: Bearer $CHAIRLIFT_KEY"` : "";
  return `curl -N ${location.origin}/v1/chat/completions \\\n  -H 'Content-Type: application/json'${key} \\\n  -d '${json}'\n`;
}

/** A value as Python writes it. */
function literal(value, indent = "    ") {
  if (value === null) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (typeof value !== "object") return JSON.stringify(value);
  const inner = `${indent}    `;
  if (Array.isArray(value)) return value.length ? `[\n${value.map((each) => inner + literal(each, inner)).join(",\n")},\n${indent}]` : "[]";
  const entries = Object.entries(value).map(([name, each]) => `${inner}${JSON.stringify(name)}: ${literal(each, inner)}`);
  return entries.length ? `{\n${entries.join(",\n")},\n${indent}}` : "{}";
}

const KNOWN = new Set(["model", "messages", "stream", "temperature", "top_p", "max_tokens", "n", "seed", "logprobs", "top_logprobs", "response_format", "tools", "tool_choice", "parallel_tool_calls"]);

export function asPython(body, hasKey) {
  const { stream, ...rest } = plain(body);
  const own = Object.entries(rest).filter(([name]) => KNOWN.has(name));
  const extra = Object.fromEntries(Object.entries(rest).filter(([name]) => !KNOWN.has(name)));
  const lines = own.map(([name, value]) => `    ${name}=${literal(value)},`);
  if (Object.keys(extra).length) lines.push(`    extra_body=${literal(extra)},`);
  const key = hasKey ? 'os.environ["CHAIRLIFT_KEY"]' : '"none"';
  return [
    ...(hasKey ? ["import os", ""] : []),
    "from openai import OpenAI",
    "",
    `client = OpenAI(base_url=${JSON.stringify(`${location.origin}/v1`)}, api_key=${key})`,
    "stream = client.chat.completions.create(",
    ...lines,
    "    stream=True,",
    ")",
    "for chunk in stream:",
    "    for choice in chunk.choices:",
    `        print(choice.delta.content or ${rest.tools ? "choice.delta.tool_calls or " : ""}"", end="", flush=True)`,
    "",
  ].join("\n");
}
