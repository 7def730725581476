"""KV-cache pages: who holds which, and which still hold something worth finding again.

Pages are numbered from 1; page 0 belongs to nobody and takes the writes of rows that only pad a step. A page is *used*
(held by one or more sequences), *cached* (held by none, but its tokens are known) or *free*. A full page is known by a
digest of all tokens up to its end, so equal prefixes share pages. The cached page used longest ago is given up first.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence


def page_digest(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Digest of a page's tokens and, through ``parent`` (b"" for the first page), of all tokens before them."""
    return hashlib.blake2b(array("q", tokens).tobytes(), key=parent, digest_size=16).digest()


class PageAllocator:
    """Hands out pages, counts their holders, remembers the contents of full ones with ``prefix_cache``."""

    def __init__(self, num_pages: int, page_size: int, prefix_cache: bool = True) -> None:
        self.num_pages, self.page_size, self.prefix_cache = num_pages, page_size, prefix_cache  # page 0 counts
        self._free = list(range(num_pages - 1, 0, -1))
        self._holders: Counter[int] = Counter()
        self._cached: OrderedDict[int, None] = OrderedDict()  # holders 0, digest known; least recently used first
        self._page_of: dict[bytes, int] = {}
        self.digest_of: dict[int, bytes] = {}  # of every page whose contents are known
        self.queries = 0  # tokens of admitted requests that were looked up
        self.hits = 0  # and those that were found

    @property
    def num_available(self) -> int:
        """Pages that :meth:`allocate` could hand out now."""
        return len(self._free) + len(self._cached)

    @property
    def num_used(self) -> int:
        return len(self._holders)

    def match(self, tokens: Sequence[int], salt: bytes = b"") -> list[int]:
        """Take hold of the known pages that begin ``tokens`` and return them in order. At least the last token is left
        to compute, for its logits. ``salt`` separates contents that depend on more than the tokens."""
        pages, digest = list[int](), salt
        for start in range(0, len(tokens) - self.page_size, self.page_size):
            digest = page_digest(digest, tokens[start : start + self.page_size])
            if digest not in self._page_of:
                break
            pages.append(self._page_of[digest])
        for page in pages:
            self._cached.pop(page, None)
            self._holders[page] += 1
        return pages

    def allocate(self, count: int) -> list[int] | None:
        """``count`` pages held once each, or None (and nothing changed) when there are not so many."""
        if count > self.num_available:
            return None
        pages = [self._free.pop() if self._free else self._evict() for _ in range(count)]
        self._holders.update(dict.fromkeys(pages, 1))
        return pages

    def _evict(self) -> int:
        page, _ = self._cached.popitem(last=False)
        del self._page_of[self.digest_of.pop(page)]
        return page

    def remember(self, page: int, digest: bytes) -> None:
        """Make a full, computed page findable. The first page with some contents is the one that is found."""
        if self.prefix_cache and digest not in self._page_of and page not in self.digest_of:
            self._page_of[digest] = page
            self.digest_of[page] = digest

    def release(self, pages: Iterable[int]) -> None:
        """Let go of ``pages`` (in sequence order): what nobody holds is cached if known, else free."""
        for page in reversed(list(pages)):  # the end of a sequence is given up before its beginning
            self._holders[page] -= 1
            if self._holders[page]:
                continue
            del self._holders[page]
            if page in self.digest_of:
                self._cached[page] = None
            else:
                self._free.append(page)

    def check_integrity(self, held: Iterable[Sequence[int]]) -> None:
        """Raise RuntimeError unless each page is free, used or cached, and those ``held`` by sequences are the used."""
        holders = Counter(page for pages in held for page in pages)
        parts = [*self._free, *self._holders, *self._cached]
        if sorted(parts) != list(range(1, self.num_pages)):
            why = f"free {len(self._free)} + used {len(self._holders)} + cached {len(self._cached)} pages"
        elif holders != self._holders:
            why = f"held by sequences: {dict(holders)}, by the books: {dict(self._holders)}"
        elif self._page_of != {digest: page for page, digest in self.digest_of.items()}:
            why = "digests and pages disagree"
        elif not self._cached.keys() <= self.digest_of.keys():
            why = "a cached page has no digest"
        else:
            return
        raise RuntimeError(f"page bookkeeping of {self.num_pages} pages is wrong: {why}")
