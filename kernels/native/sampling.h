/* The token with the largest score of each row, the lowest of equal ones. */

enum { NO_TOKEN = -1, SCORES_AT_ONCE = 1 << 15 };

INLINE int64_t argmax_row(const char *scores, const float *noise, int64_t size, int kind) {
    const size_t bytes = size_of(kind);
    const int64_t whole = size / LANES * LANES;
    vf most = splat(-INFINITY);
    vi odd = most != most; /* where something is no number, which comparisons would lose */
    for (int64_t i = 0; i < whole; i += LANES) {
        vf x = load_as(scores + i * bytes, kind);
        if (noise)
            x += load(noise + i);
        most = largest_of(x, most);
        odd |= x != x;
    }
    float largest = largest_lane(most);
    int is_odd = lanes_set(odd) != 0;
    for (int64_t i = whole; i < size; i++) {
        float x = load_one(scores + i * bytes, kind) + (noise ? noise[i] : 0);
        largest = x > largest ? x : largest;
        is_odd |= x != x;
    }
    if (is_odd || !(fabsf(largest) < INFINITY))
        return NO_TOKEN;
    int64_t first = 0;
    for (; first < whole; first += LANES) {
        vf x = load_as(scores + first * bytes, kind);
        if (noise)
            x += load(noise + first);
        if (lanes_set(x == splat(largest)))
            break;
    }
    while (load_one(scores + first * bytes, kind) + (noise ? noise[first] : 0) != largest)
        first++;
    return first;
}
