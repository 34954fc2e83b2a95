// The API key: asked for in a form, kept for this tab alone, sent in a header and never in an address.

import { byId } from "./dom.js";

const NAME = "chairlift-key";

export class SignIn {
  constructor() {
    this.key = sessionStorage.getItem(NAME) ?? "";
    this.waiting = null;
    byId("signin").addEventListener("submit", (event) => {
      event.preventDefault();
      this.key = byId("key").value.trim();
      byId("key").value = "";
      sessionStorage.setItem(NAME, this.key);
      byId("signin").hidden = true;
      this.waiting?.();
    });
  }

  get headers() {
    return this.key ? { Authorization: `Bearer ${this.key}` } : {};
  }

  fetch = (path, options = {}) => fetch(path, { ...options, headers: { ...options.headers, ...this.headers } });

  /** Show the form, and wait until it is sent. */
  ask(message) {
    byId("signin").hidden = false;
    byId("signin-error").textContent = message;
    byId("key").focus();
    return new Promise((resolve) => (this.waiting = resolve));
  }
}
