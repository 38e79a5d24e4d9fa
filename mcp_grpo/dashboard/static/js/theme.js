// Light, dark, or as the system is. Before the page is drawn, so that it does not flash.
"use strict";
(() => {
  const CHOICES = ["system", "light", "dark"];
  const SIGNS = { system: "◐", light: "☀", dark: "☾" };
  let choice = "system";
  try { choice = localStorage.getItem("theme") || "system"; } catch { /* kept for this page only */ }
  if (!CHOICES.includes(choice)) choice = "system";
  const apply = () => {
    document.documentElement.dataset.theme = choice;
    const button = document.getElementById("theme");
    if (button) {
      button.textContent = SIGNS[choice];
      const words = `Colours: ${choice === "system" ? "as the system" : choice}`;
      button.setAttribute("aria-label", words);
      button.title = words;
    }
    window.dispatchEvent(new Event("themechange"));
  };
  apply();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => window.dispatchEvent(new Event("themechange")));
  addEventListener("DOMContentLoaded", () => {
    apply();
    document.getElementById("theme").addEventListener("click", () => {
      choice = CHOICES[(CHOICES.indexOf(choice) + 1) % CHOICES.length];
      try { localStorage.setItem("theme", choice); } catch { /* kept for this page only */ }
      apply();
    });
  });
})();
