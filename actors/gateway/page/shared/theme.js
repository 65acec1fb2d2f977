"use strict";
try {
  const chosen = localStorage.getItem("actorium.theme");
  if (chosen) document.documentElement.dataset.theme = chosen;
} catch { /* no storage: as the system has it */ }
