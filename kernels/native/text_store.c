/* A bounded store of texts, searched by their last tokens. `types/text_store.py` says what calls do, and
   `reference/text_store.py` does the same in Python.

   A place is a token of a page. Under each order it stands in the list of a bucket, which a hash of the tokens before it
   chooses, the newest first. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum { PAGE = 32, ORDERS = 3, LONGEST_ORDER = 16, MOST_PLACES = 16, MOST_FOUND = 16, NONE = -1 };

static const int64_t orders[ORDERS] = {2, 6, LONGEST_ORDER};

/* Neighbours of a place in the list of its bucket. `newer` of the newest is ~bucket. */
typedef struct {
    int32_t older[ORDERS], newer[ORDERS];
} links;

typedef struct {
    int64_t text; /* NONE for a page that was given up */
    uint64_t space[2];
    int32_t before, after; /* pages of the same text */
    int32_t older, newer;  /* by when they were useful last */
    int32_t used, context; /* tokens; tokens of the text before the page, at most the longest order */
} page;

typedef struct {
    int64_t pages, buckets;
    int32_t fresh, oldest, newest; /* pages that were used; ends of the list by use */
    page *page;
    int32_t *tokens;        /* [pages * PAGE] */
    links *links;           /* [pages * PAGE] */
    int32_t *heads[ORDERS]; /* [buckets] newest place + 1, 0 for none */
} store;

/* Zeros that take memory once they are written, in huge pages where the system has them: each access is to another place. */
static void *zeros(int64_t count, size_t size) {
    const uintptr_t huge = 2 << 20;
    char *found = calloc(count, size);
    const uintptr_t begin = ((uintptr_t)found + huge - 1) & -huge, end = ((uintptr_t)found + count * size) & -huge;
    if (found && begin < end)
        madvise((void *)begin, end - begin, MADV_HUGEPAGE);
    return found;
}

void specdec_store_close(store *s) {
    free(s->page);
    free(s->tokens);
    free(s->links);
    for (int k = 0; k < ORDERS; k++)
        free(s->heads[k]);
    free(s);
}

/* NULL without memory. What is not used yet is not touched, and takes none. */
store *specdec_store_open(int64_t pages) {
    store *s = calloc(1, sizeof *s);
    if (!s)
        return NULL;
    s->pages = pages;
    s->buckets = pages * PAGE;
    s->oldest = s->newest = NONE;
    s->page = zeros(pages, sizeof *s->page);
    s->tokens = zeros(s->buckets, sizeof *s->tokens);
    s->links = zeros(s->buckets, sizeof *s->links);
    int complete = s->page && s->tokens && s->links;
    for (int k = 0; k < ORDERS; k++) {
        s->heads[k] = zeros(s->buckets, sizeof *s->heads[k]);
        complete = complete && s->heads[k];
    }
    if (complete)
        return s;
    specdec_store_close(s);
    return NULL;
}

int64_t specdec_store_bytes(const store *s) {
    const int64_t place = sizeof *s->tokens + sizeof *s->links + ORDERS * sizeof *s->heads[0];
    return s->pages * (int64_t)sizeof *s->page + s->buckets * place;
}

static int32_t bucket_of(const store *s, const uint64_t *space, int64_t order, const int32_t *before) {
    uint64_t hash = space[0] ^ (uint64_t)order;
    for (int64_t i = 0; i < order; i++) {
        hash = (hash ^ (uint32_t)before[i]) * 0x9E3779B97F4A7C15u;
        hash ^= hash >> 29;
    }
    return (int32_t)((hash >> 32) * (uint64_t)s->buckets >> 32);
}

static void leave_list(store *s, int32_t p) {
    const int32_t older = s->page[p].older, newer = s->page[p].newer;
    *(older == NONE ? &s->oldest : &s->page[older].newer) = newer;
    *(newer == NONE ? &s->newest : &s->page[newer].older) = older;
}

static void join_list(store *s, int32_t p) {
    s->page[p].older = s->newest;
    s->page[p].newer = NONE;
    *(s->newest == NONE ? &s->oldest : &s->page[s->newest].newer) = p;
    s->newest = p;
}

static void unlink_place(store *s, int32_t place, int k) {
    const int32_t older = s->links[place].older[k], newer = s->links[place].newer[k];
    if (newer < 0)
        s->heads[k][~newer] = older + 1;
    else
        s->links[newer].older[k] = older;
    if (older != NONE)
        s->links[older].newer[k] = newer;
}

static void link_place(store *s, int32_t place, int k, int32_t bucket) {
    const int32_t head = s->heads[k][bucket] - 1;
    s->links[place].older[k] = head;
    s->links[place].newer[k] = ~bucket;
    if (head != NONE)
        s->links[head].newer[k] = place;
    s->heads[k][bucket] = place + 1;
}

static void give_up(store *s, int32_t p) {
    page *own = &s->page[p];
    /* Memory is waited for once, and not for each place. */
    for (int32_t place = p * PAGE; place < p * PAGE + own->used; place++)
        for (int k = 0; k < ORDERS; k++) {
            const int32_t older = s->links[place].older[k], newer = s->links[place].newer[k];
            __builtin_prefetch(newer < 0 ? (void *)&s->heads[k][~newer] : (void *)&s->links[newer], 1);
            if (older != NONE)
                __builtin_prefetch(&s->links[older], 1);
        }
    for (int k = 0; k < ORDERS; k++)
        for (int32_t i = 0; i < own->used; i++)
            if (own->context + i >= orders[k])
                unlink_place(s, p * PAGE + i, k);
    if (own->before != NONE)
        s->page[own->before].after = NONE;
    if (own->after != NONE)
        s->page[own->after].before = NONE;
    leave_list(s, p);
    own->text = NONE;
}

/* A page that is free, as the last one of a text behind `before`. */
static int32_t new_page(store *s, int64_t text, const uint64_t *space, int32_t before, int64_t context) {
    int32_t p = s->oldest;
    if (s->fresh < s->pages)
        p = s->fresh++;
    else
        give_up(s, p);
    /* What was given up may be the page before. */
    if (before != NONE && s->page[before].text != text)
        before = NONE;
    if (before != NONE)
        s->page[before].after = p;
    const int32_t known = context < LONGEST_ORDER ? (int32_t)context : LONGEST_ORDER;
    s->page[p] = (page){.text = text, .space = {space[0], space[1]}, .before = before, .after = NONE, .context = known};
    join_list(s, p);
    return p;
}

/* Link `count` places, at most a page, from `place` on; `tokens` are theirs, behind `context` known ones. */
static void link_places(store *s, int32_t place, const int32_t *tokens, int64_t context, int64_t count) {
    int32_t buckets[PAGE][ORDERS];
    /* Memory is waited for once, and not for each place. */
    for (int64_t i = 0; i < count; i++)
        for (int k = 0; k < ORDERS && context + i >= orders[k]; k++) {
            buckets[i][k] = bucket_of(s, s->page[place / PAGE].space, orders[k], tokens + i - orders[k]);
            __builtin_prefetch(&s->heads[k][buckets[i][k]], 1);
        }
    for (int64_t i = 0; i < count; i++)
        for (int k = 0; k < ORDERS && context + i >= orders[k]; k++)
            __builtin_prefetch(&s->links[s->heads[k][buckets[i][k]] - (s->heads[k][buckets[i][k]] > 0)], 1);
    for (int64_t i = 0; i < count; i++)
        for (int k = 0; k < ORDERS && context + i >= orders[k]; k++)
            link_place(s, place + (int32_t)i, k, buckets[i][k]);
}

/* `tokens`: `context` known ones, and `count` new ones. */
int64_t specdec_store_append(store *s, int64_t text, uint64_t space, uint64_t more_space, int64_t last,
                             const int32_t *tokens, int64_t context, int64_t count) {
    const uint64_t own_space[2] = {space, more_space};
    int32_t p = last != NONE && s->page[last].text == text ? (int32_t)last : NONE;
    for (int64_t i = context, end = context + count; i < end;) {
        if (p == NONE || s->page[p].used == PAGE)
            p = new_page(s, text, own_space, p, i);
        page *own = &s->page[p];
        const int64_t fitting = end - i < PAGE - own->used ? end - i : PAGE - own->used;
        const int32_t place = p * PAGE + own->used;
        memcpy(s->tokens + place, tokens + i, fitting * sizeof *tokens);
        link_places(s, place, tokens + i, i, fitting);
        own->used += (int32_t)fitting;
        i += fitting;
    }
    return p;
}

/* How many of the `count` last tokens stand before a place. */
static int64_t match_at(const store *s, int32_t place, const int32_t *last, int64_t count) {
    int32_t p = place / PAGE, at = place % PAGE;
    for (int64_t found = 0; found < count; found++) {
        if (!at) {
            p = s->page[p].before;
            if (p == NONE)
                return found;
            at = PAGE;
        }
        if (s->tokens[p * PAGE + --at] != last[count - 1 - found])
            return found;
    }
    return count;
}

typedef struct {
    int64_t match;
    int32_t place;
} match;

/* Insert a place into those found, in falling order of matches, unless one of at least its match begins alike; one of a
   shorter match that does is dropped. Returns how many there are. */
static int64_t keep(const store *s, match own, int64_t found, int64_t most, match *matches) {
    int64_t alike = 0, at = 0;
    while (alike < found && s->tokens[matches[alike].place] != s->tokens[own.place])
        alike++;
    if (alike < found) {
        if (matches[alike].match >= own.match)
            return found;
        found--;
        memmove(matches + alike, matches + alike + 1, (found - alike) * sizeof *matches);
    }
    while (at < found && matches[at].match >= own.match)
        at++;
    if (at == most)
        return found;
    const int64_t kept = found == most ? most - 1 : found;
    memmove(matches + at + 1, matches + at, (kept - at) * sizeof *matches);
    matches[at] = own;
    return kept + 1;
}

/* Returns how many are found, of each of which `out` `[most][3 + depth]` gets the match, the place, the number of tokens
   that follow, and these. `most` is at most `MOST_FOUND`. */
int64_t specdec_store_find(const store *s, int64_t text, uint64_t space, uint64_t more_space, const int32_t *last,
                           int64_t count, int64_t most, int64_t depth, int64_t *out) {
    const uint64_t own_space[2] = {space, more_space};
    match matches[MOST_FOUND];
    int64_t found = 0;
    for (int k = ORDERS - 1; k >= 0 && found < most; k--) {
        if (count < orders[k])
            continue;
        int32_t place = s->heads[k][bucket_of(s, own_space, orders[k], last + count - orders[k])] - 1;
        for (int seen = 0; place != NONE && seen < MOST_PLACES; seen++) {
            const int32_t next = s->links[place].older[k];
            if (next != NONE) {
                __builtin_prefetch(&s->links[next]);
                __builtin_prefetch(&s->page[next / PAGE]);
                __builtin_prefetch(&s->tokens[next]);
            }
            const page *own = &s->page[place / PAGE];
            if (own->text != text && own->space[0] == space && own->space[1] == more_space) {
                const match one = {match_at(s, place, last, count), place};
                if (one.match >= orders[k])
                    found = keep(s, one, found, most, matches);
            }
            place = next;
        }
    }
    for (int64_t one = 0; one < found; one++, out += 3 + depth) {
        int32_t p = matches[one].place / PAGE, at = matches[one].place % PAGE;
        out[0] = matches[one].match;
        out[1] = matches[one].place;
        for (out[2] = 0; out[2] < depth; out[2]++, at++) {
            if (at == PAGE) {
                p = s->page[p].after;
                at = 0;
            }
            if (p == NONE || at == s->page[p].used)
                break;
            out[3 + out[2]] = s->tokens[p * PAGE + at];
        }
    }
    return found;
}

void specdec_store_touch(store *s, int64_t place) {
    const int32_t p = (int32_t)(place / PAGE);
    if (s->page[p].text == NONE || s->newest == p)
        return;
    leave_list(s, p);
    join_list(s, p);
}
