// Sphinx's own scores; but why forge is as it is (decisions), and what changed, come after how to use it.
var Scorer = {
  score: ([docname, title, anchor, description, score]) => {
    if (docname.startsWith("decisions/") || docname === "changelog") return score - 100;
    if (docname.startsWith("how-to/") || docname === "symptoms") return score + 12;
    return score;
  },
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
