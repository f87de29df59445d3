/* Shared by the kernels of `attention`; there is one for each instruction set. */
#ifndef OUTRIDER_ATTENTION_H
#define OUTRIDER_ATTENTION_H

#include "instruction_sets.h"

/* One task: neighbouring rows of a segment at neighbouring KV heads. */
typedef struct {
    int64_t segment, first_row, num_rows, first_head, num_heads;
} Part;

typedef struct Parts {
    const Attention *attention;
    const Part *parts;
    int64_t count, max_queries; /* of a part at a head */
} Parts;

void attention_amx(const Parts *parts, int num_threads);
void attention_amx_emulated(const Parts *parts, int num_threads);

static inline int64_t group_of(const Attention *a) { return a->num_heads / a->num_kv_heads; } /* queries that share a KV head */

static inline int64_t first_row_of(const Attention *a, const Part *p) { return a->row_starts[p->segment] + p->first_row; }

/* Query `q` of a part at a KV head, and its place in `y`. */
static inline const float *query_of(const Attention *a, const Part *p, int64_t kv_head, int64_t q) {
    const int64_t group = group_of(a), row_size = (a->num_heads + 2 * a->num_kv_heads) * a->head_dim;
    return a->qkv + (first_row_of(a, p) + q / group) * row_size + (kv_head * group + q % group) * a->head_dim;
}
static inline float *answer_of(const Attention *a, const Part *p, int64_t kv_head, int64_t q) {
    const int64_t group = group_of(a), head = kv_head * group + q % group;
    return a->y + ((first_row_of(a, p) + q / group) * a->num_heads + head) * a->head_dim;
}

/* Queries `first` to `end` are to attend to what they see of the chunk at `start`. In a tree the positions after the
   prefix are those of `path`, which says which node of the tree each of them is; else it is NULL. */
typedef void (*Visit)(void *progress, int64_t start, const int64_t *path, int64_t first, int64_t end);

/* Indices in the cache of the first head's vectors at `count` positions from `start`. */
static inline void find(const Attention *a, const Part *p, int64_t start, int64_t count, const int64_t *path, int64_t *indices) {
    const int64_t *table = a->block_tables + p->segment * a->table_len, base = a->prefix_lens[p->segment];
    const int64_t stride = a->num_kv_heads * a->head_dim, head = p->first_head * a->head_dim;
    int64_t block = start / a->block_size, offset = start % a->block_size; /* a division takes as long as a row of keys */
    for (int64_t i = 0; i < count; i++) {
        if (path == NULL || start + i < base) {
            indices[i] = (table[block] * a->block_size + offset) * stride + head;
        } else {
            const int64_t node = base + path[start + i - base];
            indices[i] = (table[node / a->block_size] * a->block_size + node % a->block_size) * stride + head;
        }
        if (++offset == a->block_size) block++, offset = 0;
    }
}

/* Visits all chunks of `chunk` positions that a part's queries see, from the first on. */
static inline void walk(const Attention *a, const Part *p, const int64_t chunk, const Visit visit, void *progress) {
    const int64_t group = group_of(a), first_row = first_row_of(a, p);
    const int64_t *positions = a->positions + first_row;
    /* Everything before the segment's own tokens is seen by all of its rows, as far as their window reaches. */
    const int64_t base = a->prefix_lens[p->segment];
    const int64_t *paths = a->paths == NULL ? NULL : a->paths + first_row * a->path_len;
    const int is_tree = paths != NULL && paths[0] >= 0;
    const int64_t first_position = is_tree ? base : positions[0]; /* a tree's rows are not in the order of positions */
    const int64_t first_seen = first_position >= a->span ? first_position - a->span + 1 : 0;
    const int64_t first = first_seen / chunk * chunk;
    if (!is_tree) {
        for (int64_t start = first; start <= positions[p->num_rows - 1]; start += chunk) {
            const int64_t row = start - positions[0]; /* the first that reaches into this chunk */
            visit(progress, start, NULL, row > 0 ? row * group : 0, p->num_rows * group);
        }
        return;
    }
    const int64_t shared = base / chunk * chunk;
    for (int64_t start = first; start < shared; start += chunk)
        visit(progress, start, NULL, 0, p->num_rows * group);
    for (int64_t row = 0; row < p->num_rows; row++)
        for (int64_t start = shared > first ? shared : first; start <= positions[row]; start += chunk)
            visit(progress, start, paths + row * a->path_len, row * group, (row + 1) * group);
}

#endif
