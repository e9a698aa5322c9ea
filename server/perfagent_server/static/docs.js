// Draws /openapi.json. Everything goes in by textContent, so no name or description can become markup.
"use strict";

function element(tag, text, className) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  return made;
}

function spell(schema, all, depth) {
  if (!schema || depth > 6) return "…";
  if (schema.$ref) return spell(all[schema.$ref.split("/").pop()], all, depth + 1);
  if (schema.enum) return schema.enum.map((item) => JSON.stringify(item)).join(" | ");
  if (schema.const !== undefined) return JSON.stringify(schema.const);
  const choices = schema.anyOf || schema.oneOf;
  if (choices) return choices.map((item) => spell(item, all, depth + 1)).join(" | ");
  if (schema.type === "array") return "[" + spell(schema.items, all, depth + 1) + ", …]";
  if (schema.properties) {
    const pad = "  ".repeat(depth + 1);
    const required = new Set(schema.required || []);
    const rows = Object.entries(schema.properties).map(
      ([name, item]) => pad + JSON.stringify(name) + (required.has(name) ? ": " : "?: ") + spell(item, all, depth + 1));
    return "{\n" + rows.join(",\n") + "\n" + "  ".repeat(depth) + "}";
  }
  if (schema.additionalProperties) return "{name: " + spell(schema.additionalProperties, all, depth + 1) + ", …}";
  return schema.type || "any";
}

function operationBox(method, path, operation, schemas) {
  const box = element("details");
  const head = element("summary");
  head.append(element("span", method.toUpperCase(), "method"), element("code", path), " ", operation.summary || "");
  box.append(head);
  if (operation.description) box.append(element("p", operation.description));
  if (operation.parameters && operation.parameters.length) {
    const table = element("table");
    for (const parameter of operation.parameters) {
      const row = element("tr");
      const fallback = parameter.schema && parameter.schema.default;
      row.append(element("td", parameter.name + (parameter.required ? " *" : "")), element("td", parameter.in),
        element("td", spell(parameter.schema, schemas, 0) + (fallback === undefined || fallback === null ? "" : " = " + fallback)),
        element("td", parameter.description || (parameter.schema && parameter.schema.description) || ""));
      table.append(row);
    }
    box.append(table);
  }
  const body = operation.requestBody && operation.requestBody.content;
  for (const [media, content] of Object.entries(body || {})) {
    box.append(element("p", "Body, " + media), element("pre", spell(content.schema, schemas, 0)));
  }
  for (const [status, response] of Object.entries(operation.responses)) {
    if (status === "4XX") continue;
    for (const [media, content] of Object.entries(response.content || { "no body": {} })) {
      box.append(element("p", "Answer " + status + ", " + media));
      if (content.schema) box.append(element("pre", spell(content.schema, schemas, 0)));
    }
  }
  return box;
}

async function draw() {
  const api = await (await fetch("/openapi.json")).json();
  const schemas = (api.components && api.components.schemas) || {};
  document.getElementById("about").textContent = api.info.description + " Version " + api.info.version + ".";
  const groups = new Map();
  for (const [path, item] of Object.entries(api.paths)) {
    for (const [method, operation] of Object.entries(item)) {
      const tag = (operation.tags || ["other"])[0];
      if (!groups.has(tag)) groups.set(tag, []);
      groups.get(tag).push(operationBox(method, path, operation, schemas));
    }
  }
  const main = document.getElementById("paths");
  main.replaceChildren();
  for (const [tag, boxes] of groups) main.append(element("h2", tag), ...boxes);
}

draw().catch((error) => { document.getElementById("paths").textContent = "The API could not be read: " + error; });
