/* How the book ranks what it finds: sections by BM25, with the index that extensions/book_search.py writes.
 *
 * A question need not stand on a page word by word: sections count by the words that they have, rare words more than
 * frequent ones. Words of headings and of the page's title count more than those of the text.
 */
"use strict";

const BookSearch = {
  SATURATION: 1.2, // BM25's k1
  LENGTH: 0.6, // BM25's b
  SHORTEST: 0.5, // shorter sections, in means, count as that long
  HEADING: 3, // a word of a section's heading counts as often
  TITLE: 2, // a word of the page's title, in each of its sections
  PAGE: 0.6, // weight of words that stand elsewhere on the page
  SHOWN: 30,

  /* Numbers of occurrences by section, and how rare the word is. */
  occurrences: (word) => {
    const { text, titles, sections, pages } = BookIndex;
    const counts = new Map();
    const add = (section, count) => counts.set(section, (counts.get(section) ?? 0) + count);
    const forms = Object.hasOwn(text, word) || Object.hasOwn(titles, word) ? [word] : BookSearch.longer(word);
    for (const form of forms) {
      const places = Object.hasOwn(text, form) ? text[form] : [];
      for (let at = 0; at < places.length; at += 2) add(places[at], places[at + 1]);
      for (const section of Object.hasOwn(titles, form) ? titles[form] : []) add(section, BookSearch.HEADING);
    }
    const num = new Set([...counts.keys()].map((section) => sections[section][0])).size;
    const weight = num ? Math.log(1 + (pages.length - num + 0.5) / (num + 0.5)) : 0;
    return { counts, weight };
  },

  /* Words of the index that begin with a word that it lacks. */
  longer: (word) => {
    const all = new Set([...Object.keys(BookIndex.text), ...Object.keys(BookIndex.titles)]);
    return word.length < 4 ? [] : [...all].filter((term) => term.startsWith(word));
  },

  rank: (searchTerms, excludedTerms) => {
    const { sections, lengths, pages } = BookIndex;
    const mean = lengths.reduce((sum, length) => sum + length, 0) / lengths.length;
    const scores = sections.map(() => 0);
    const onPage = new Map(pages.map((_, page) => [page, 0]));
    for (const word of searchTerms) {
      const { counts, weight } = BookSearch.occurrences(word);
      const seen = new Set();
      sections.forEach(([page], section) => {
        const titled = counts.has(section) && pages[page][2].includes(word) ? BookSearch.TITLE : 0;
        const count = (counts.get(section) ?? 0) + titled;
        if (count === 0) return;
        const length = Math.max(lengths[section] / mean, BookSearch.SHORTEST);
        const norm = BookSearch.SATURATION * (1 - BookSearch.LENGTH + BookSearch.LENGTH * length);
        scores[section] += (weight * count * (BookSearch.SATURATION + 1)) / (count + norm);
        if (!seen.has(page)) onPage.set(page, onPage.get(page) + weight);
        seen.add(page);
      });
    }
    const excluded = new Set();
    for (const word of excludedTerms) {
      for (const section of BookSearch.occurrences(word).counts.keys()) excluded.add(sections[section][0]);
    }
    const best = new Map();
    sections.forEach(([page], section) => {
      if (scores[section] > 0 && !(scores[best.get(page)] >= scores[section])) best.set(page, section);
    });
    return [...best]
      .filter(([page]) => !excluded.has(page))
      .map(([page, section]) => {
        const [docname, title] = pages[page];
        const [, anchor, heading] = sections[section];
        const shown = anchor && heading !== title ? `${title} > ${heading}` : title;
        const score = scores[section] + BookSearch.PAGE * onPage.get(page);
        return [docname, shown, anchor ? `#${anchor}` : "", null, score, `${docname}.md`, SearchResultKind.text];
      })
      .sort((one, other) => other[4] - one[4])
      .slice(0, BookSearch.SHOWN);
  },
};

/* Sphinx's results for a name of the API or a whole title stay in front of these; in front of all, the pages that
 * search_words.yaml names for the whole question. */
Search._performSearch = ((sphinx) => (query, searchTerms, excludedTerms, highlightTerms, objectTerms) => {
  Search.performTermsSearch = () => [];
  const exact = sphinx(query, searchTerms, excludedTerms, highlightTerms, objectTerms).slice(-3);
  const pagesOf = (results) => new Set(results.map((result) => result[0]));
  const known = pagesOf(exact);
  const ranked = BookSearch.rank(searchTerms, excludedTerms).filter((result) => !known.has(result[0]));
  const question = query.trim().toLowerCase();
  const numbers = Object.hasOwn(BookIndex.asked, question) ? BookIndex.asked[question] : [];
  const asked = numbers.map((page) => {
    const [docname, title] = BookIndex.pages[page];
    return [docname, title, "", null, 0, `${docname}.md`, SearchResultKind.text];
  });
  const first = pagesOf(asked);
  const rest = [...ranked.reverse(), ...exact].filter((result) => !first.has(result[0]));
  return [...rest, ...asked.reverse()]; // the best comes last
})(Search._performSearch);

/* Sphinx 9.0 gives Chinese pages the English stemmer under a name that it then does not find. */
if (typeof Stemmer === "undefined") window.Stemmer = EnglishStemmer;

/* Chinese has no spaces: of a run of its characters, every word is taken that the index knows. */
if (document.documentElement.lang.startsWith("zh")) {
  const isKnown = (word) => Object.hasOwn(BookIndex.text, word) || Object.hasOwn(BookIndex.titles, word);
  splitQuery = (query) =>
    (query.match(/\p{Script=Han}+|[\p{Letter}\p{Number}_]+/gu) ?? []).flatMap((run) => {
      const known = [];
      for (const part of run.match(/\p{Script=Han}+|[^\p{Script=Han}]+/gu)) {
        if (!/\p{Script=Han}/u.test(part)) known.push(part);
        for (let start = 0; start < part.length; start += 1) {
          for (let end = start + 2; end <= Math.min(part.length, start + 6); end += 1) {
            if (isKnown(part.slice(start, end))) known.push(part.slice(start, end));
          }
        }
      }
      return known;
    });
}
