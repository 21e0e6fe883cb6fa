/* Nearest rows of queries by their lists and, where these do not certify, by a tree of boxes: see neighbors.py and
   neighbor_tree.py, whose arrays are read. Numbers are float32. */

#include <math.h>
#include <stdint.h>

enum { MOST = 64 }; /* children of a box, and rows of a leaf, at most */

/* B queries; C state and A action entries, D = C + A; M rows; k entries of a list. */
typedef struct {
    int states, actions, length, levels, leaf;
    float beta, slack;
    const float *state, *action;       /* (M, C), (M, A) */
    const int32_t *near;               /* (M, k) rows by distance of states */
    const float *square;               /* (M, k) squares of those distances times beta, or null */
    const int *children;               /* of a box, by level */
    const float *const *low, *const *high; /* (parents, D, children), by level */
    const int32_t *order;              /* (leaves, L) rows */
    const float *tails;                /* (leaves, A, L) their actions */
} search_t;

typedef struct {
    const float *state, *action; /* (C), (A) */
    float best, head;            /* squared distances: the least so far; states of rows that no list holds are farther */
    int64_t row;
    int found; /* a row nearer than any listed one */
} query_t;

static float between(int n, const float *a, const float *b) {
    float sum = 0;
    for (int i = 0; i < n; i++) sum += (a[i] - b[i]) * (a[i] - b[i]);
    return sum;
}

/* Return whether the list certifies the nearest row. */
static int look_up(const search_t *s, int64_t row, query_t *q) {
    const int32_t *near = s->near + row * s->length;
    q->best = INFINITY, q->row = near[0];
    for (int j = 0; j < s->length; j++) {
        const float *other = s->state + (int64_t)near[j] * s->states;
        q->head = s->square ? s->square[row * s->length + j]
                            : s->beta * s->beta * between(s->states, other, s->state + row * s->states);
        if (q->best <= q->head * (1 - s->slack)) return 1; /* all that follow are farther */
        const float cost = q->head + between(s->actions, s->action + (int64_t)near[j] * s->actions, q->action);
        if (cost < q->best) q->best = cost, q->row = near[j];
    }
    return 0;
}

static float tail_limit(const search_t *s, const query_t *q) { return q->best * (1 + s->slack) - q->head; }

static void compare(const search_t *s, int64_t leaf, query_t *q) {
    float square[MOST] = {0};
    for (int a = 0; a < s->actions; a++) {
        const float *tail = s->tails + (leaf * s->actions + a) * s->leaf;
        for (int l = 0; l < s->leaf; l++) square[l] += (tail[l] - q->action[a]) * (tail[l] - q->action[a]);
    }
    for (int l = 0; l < s->leaf; l++) {
        if (!(square[l] <= tail_limit(s, q))) continue;
        const int32_t row = s->order[leaf * s->leaf + l];
        const float cost =
            square[l] + s->beta * s->beta * between(s->states, s->state + (int64_t)row * s->states, q->state);
        if (cost < q->best || (q->found && cost == q->best && row < q->row))
            q->best = cost, q->row = row, q->found = 1;
    }
}

/* Compare the leaves below a box that may hold nearer rows, the nearest boxes first. */
static void descend(const search_t *s, int level, int64_t box, query_t *q) {
    if (level == s->levels) {
        compare(s, box, q);
        return;
    }
    const int n = s->children[level], width = s->states + s->actions;
    const float *low = s->low[level] + box * width * n, *high = s->high[level] + box * width * n;
    float square[MOST] = {0}, tail[MOST] = {0};
    for (int d = 0; d < width; d++, low += n, high += n) {
        const int is_tail = d >= s->states;
        const float point = is_tail ? q->action[d - s->states] : s->beta * q->state[d];
        float *sum = is_tail ? tail : square;
        for (int j = 0; j < n; j++) {
            const float below = low[j] - point, above = point - high[j];
            const float gap = below > 0 ? below : above > 0 ? above : 0;
            sum[j] += gap * gap;
        }
    }
    for (int j = 0; j < n; j++) square[j] += tail[j];
    for (;;) {
        int next = 0;
        for (int j = 1; j < n; j++)
            if (square[j] < square[next]) next = j;
        if (!(square[next] <= q->best * (1 + s->slack) && square[next] < INFINITY)) return;
        square[next] = INFINITY; /* seen */
        if (tail[next] <= tail_limit(s, q)) descend(s, level + 1, box * n + next, q);
    }
}

/* row (B), state (B, C), action (B, A); writes nearest rows index (B) and whether their lists certified them (B). A list
   that is `whole` holds every row; without `exact` the nearest listed row is taken. */
void nearest_rows(int queries, int states, int actions, int length, int levels, int leaf, int whole, int exact,
                  float beta, float slack, const int64_t *row, const float *state, const float *action,
                  const float *all_states, const float *all_actions, const int32_t *near, const float *square,
                  const int *children, const float *const *low, const float *const *high, const int32_t *order,
                  const float *tails, int64_t *index, uint8_t *certified) {
    const search_t s = {states, actions, length,   levels, leaf, beta,  slack, all_states,
                        all_actions, near,   square, children, low,  high, order, tails};
    for (int b = 0; b < queries; b++) {
        query_t q = {.state = state + (int64_t)b * states, .action = action + (int64_t)b * actions};
        certified[b] = look_up(&s, row[b], &q) || whole;
        if (!certified[b] && exact) descend(&s, 0, 0, &q);
        index[b] = q.row;
    }
}
