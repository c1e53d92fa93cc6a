// The search of the site, in the place of the theme's, which asks for JSON in a worker and so finds nothing in a page that is
// opened as a file. The pages are loaded as a script when the search is first opened.
//
// A section scores by the words of the query that it has, rare words more than frequent ones, words of its title most. What
// people read comes before what was measured: a weight for each folder.

const WEIGHTS = [
  [/^docs\/symptoms/, 4], [/^(docs\/|README|index)/, 3], [/^packs\//, 1], [/^(benchmarks|proof)\//, 0.4], [/./, 0.6],
];
const COMMON = new Set(("a an and are as at be but by can do does for from has have how i if in is it my not of on or so that the " +
  "this to was we what when where which why with you after before").split(" "));
const MOST = 20, BEFORE = 50, LONG = 260;

/** The words of a query without frequent ones, each as a pattern of the beginning of a word, without an ending of the plural. */
const words = query => {
  const all = query.toLowerCase().match(/[\p{L}\p{N}_.-]+/gu) ?? [];
  const rare = all.filter(word => !COMMON.has(word));
  return (rare.length ? rare : all).map(word => {
    const stem = word.length > 4 ? word.replace(/(es|s|ed|ing)$/, "") : word;
    return new RegExp(`(?<![\\p{L}\\p{N}])${stem.replace(/[.*+?^${}()|[\]\\-]/g, "\\$&")}`, "giu");
  });
};

/** The best sections for a query, each with the excerpt that has most of its words. */
const search = (pages, query) => {
  const patterns = words(query);
  const counted = pages.map(page => ({page,
    title: patterns.map(pattern => (page.title.match(pattern) ?? []).length),
    text: patterns.map(pattern => (page.text.match(pattern) ?? []).length)}));
  const rarity = patterns.map((_, n) =>
    Math.log(1 + pages.length / (1 + counted.filter(each => each.title[n] + each.text[n] > 0).length)));
  return counted.map(({page, title, text}) => {
    const has = patterns.map((_, n) => title[n] + text[n] > 0);
    const share = has.filter(Boolean).length / patterns.length;
    const sum = patterns.reduce((all, _, n) => all + rarity[n] * (4 * Math.min(title[n], 1) + Math.log1p(text[n])), 0);
    // A short text about these words says more than a long one that has them too.
    const length = 1 + Math.log1p(page.text.length / 1000);
    return {page, score: sum * share ** 3 * WEIGHTS.find(([path]) => path.test(page.location))[1] / length};
  }).filter(each => each.score > 0).sort((one, other) => other.score - one.score).slice(0, MOST)
    .map(({page}) => ({...page, excerpt: excerpt(page.text, patterns)}));
};

/** The part of a text that has most of the words. */
const excerpt = (text, patterns) => {
  const places = patterns.flatMap((pattern, n) => [...text.matchAll(pattern)].map(found => [found.index, n]));
  const near = ([at]) => new Set(places.filter(([other]) => other >= at && other < at + LONG - BEFORE).map(([, n]) => n)).size;
  const best = places.reduce((found, place) => near(place) > near(found) ? place : found, places[0] ?? [0, 0])[0];
  const start = Math.max(0, text.lastIndexOf("\n", best) + 1, best - BEFORE);
  return `${start ? "… " : ""}${text.slice(start, start + LONG).replace(/\s+/g, " ")}`;
};

// The dialog comes after the scripts of a page.
document.addEventListener("DOMContentLoaded", () => {
  const modal = document.getElementById("properdocs_search_modal");
  const input = document.getElementById("properdocs-search-query");
  const results = document.getElementById("properdocs-search-results");
  results.setAttribute("aria-live", "polite");

  let loading = null;
  const load = () => loading ??= new Promise((done, fail) => {
    const script = document.createElement("script");
    script.src = `${base_url}/search/pages.js`;
    script.onload = () => done(SEARCHED_PAGES);
    script.onerror = () => fail(new Error("search/pages.js is missing"));
    document.head.append(script);
  });

  const show = async () => {
    const query = input.value.trim();
    let found;
    try {
      found = query.length > 1 ? search(await load(), query) : [];
    } catch (error) {
      results.textContent = `The search does not work here: ${error.message}. \`megacpp-overlays symptom WORDS\` searches from a shell.`;
      return;
    }
    if (query !== input.value.trim()) return;
    results.replaceChildren(...found.map(({location, title, excerpt}) => {
      const article = document.createElement("article"), heading = document.createElement("h5"), link = document.createElement("a");
      link.href = `${base_url}/${location}`;
      link.textContent = title;
      const page = document.createElement("small");
      page.textContent = ` ${location.replace(/\.html.*/, "")}`;
      const text = document.createElement("p");
      text.textContent = excerpt;
      heading.append(link, page);
      article.append(heading, text);
      return article;
    }));
    if (!found.length && query.length > 1) results.textContent = results.dataset.noResultsText;
  };

  let waiting;
  input.addEventListener("input", () => { clearTimeout(waiting); waiting = setTimeout(show, 150); });
  input.form.addEventListener("submit", async event => {
    event.preventDefault();
    await show();
    results.querySelector("a")?.click();
  });
  modal.addEventListener("show.bs.modal", () => { load().catch(() => {}); });
  const asked = new URLSearchParams(location.search).get("q");
  if (asked) {
    input.value = asked;
    show();
  }
});
