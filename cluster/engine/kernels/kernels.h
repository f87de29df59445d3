/*
 * The CPU engine's kernels: float32 arithmetic with the same bits on every processor (portable.h); weights in float32,
 * bfloat16 or integers, KV in float32 or bfloat16. Products with weights that are not in float32 use the units for
 * bfloat16 where there are any.
 *
 * A row's result has the same bits (as long as keys and values are finite) whatever the other rows of a step, the number of threads and the way a prompt
 * is cut into chunks: every sum runs in an order that is fixed by the model's shape and the row's position.
 */
#ifndef OUTRIDER_KERNELS_H
#define OUTRIDER_KERNELS_H

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

/* parallel.c: task(job, i) for every i below count, on up to num_threads threads, the caller's included. */
typedef void (*Task)(const void *job, int64_t item);
void parallel_for(Task task, const void *job, int64_t count, int num_threads);
/*
 * Items that threads take one by one, each beginning with neighbouring ones of its own, and ending by helping others with
 * theirs. Threads that write neighbours would wait for each other's cache lines.
 */
#define MAX_SHARES 64
typedef struct {
    int64_t count, num_shares;
    _Atomic int64_t next[MAX_SHARES];
} Shares;
void divide(Shares *shares, int64_t count, int num_threads);
int64_t next_of(Shares *shares, int64_t share); /* an item, or -1 when none is left */
/* Returns the number of threads that are worth waking for this work: num_threads or 1. */
int useful_threads(int64_t num_rows, int64_t row_size, int num_threads);

/* instruction_sets.c */
typedef enum { PORTABLE, AVX512_BF16, AMX, AMX_EMULATED } InstructionSet; /* of products; the last one for tests */
int is_supported(InstructionSet set); /* here: by compiler, processor and system */
/* Sets the width of registers of the portable kernels, in lanes (16, 8 or 4; 0: the widest that are fast). Results do not
   change. Returns 0, or -1 if the processor has none of that width. */
int use_lanes(int64_t lanes);

/* linear.c */
typedef enum { FLOAT32, BFLOAT16, INT8, INT4 } Format; /* of weights */
typedef struct {
    const void *panels;  /* for PORTABLE as linear_portable.c says, else as blocks.h does */
    const float *scales; /* integers only: [panels, in_features / group_size, outputs of a panel] */
    const float *bias;   /* [out_features] or NULL */
    int64_t in_features, out_features, group_size;
    int64_t format;          /* a Format */
    int64_t instruction_set; /* an InstructionSet; of weights in FLOAT32 always PORTABLE */
} Weight;
typedef struct {
    const float *x; /* [num_rows, in_features] */
    const Weight *weight;
    float *y;       /* [num_rows, out_features] */
    float *scratch; /* [num_rows, linear_scratch_size(weight)], on a boundary of 64 bytes */
    int64_t num_rows;
} Linear;
int64_t linear_scratch_size(const Weight *weight);
void linear(const Linear *linear, int num_threads);

/* attention.c */
typedef struct {
    const float *qkv;            /* [num_rows, (num_heads + 2 * num_kv_heads) * head_dim]; queries rotated */
    const void *keys, *values;   /* [num_slots, num_kv_heads, head_dim] */
    float *y;                    /* [num_rows, num_heads * head_dim] */
    const int64_t *row_starts;   /* [num_segments + 1] */
    const int64_t *prefix_lens;  /* [num_segments]: tokens before the segment; in a tree, before its first node */
    const int64_t *block_tables; /* [num_segments, table_len] */
    const int64_t *positions;    /* [num_rows] */
    const int64_t *paths;        /* NULL without trees; [num_rows, path_len]: nodes from a root to this row's, then -1;
                                    all -1 where the segment is a chain */
    int64_t path_len, num_segments, table_len, block_size, num_heads, num_kv_heads, head_dim;
    int64_t span; /* positions that a row sees at most, itself included */
    int is_bfloat16;
    int64_t instruction_set; /* an InstructionSet; for tiles keys and values have to be in bfloat16 */
} Attention;
int attention(const Attention *attention, int num_threads); /* 0, or -1 without memory */

/* elementwise_portable.c, called through Portable */
typedef struct {
    float *hidden;       /* [num_rows, size]; delta is added to it */
    const float *delta;  /* [num_rows, size] or NULL */
    const float *weight; /* [size], or NULL: y is a copy of hidden */
    float *y;            /* [num_rows, size] */
    int64_t size;
    float eps;
} Norm;

typedef struct {
    const float *x; /* [num_rows, 2 * size]: gate, up */
    float *y;       /* [num_rows, size] */
    int64_t size;
    int is_gelu; /* otherwise SiLU */
} Gate;

typedef struct {
    float *qkv;               /* as above; queries are rotated in place */
    const float *norm;        /* [num_heads + num_kv_heads, head_dim], or NULL: no norm before the rotation */
    const float *cos, *sin;   /* [max_position, head_dim / 2] */
    const int64_t *positions; /* [num_rows] */
    const int64_t *slots;     /* [num_rows] */
    void *keys, *values;      /* [num_slots, num_kv_heads, head_dim] */
    int64_t num_heads, num_kv_heads, head_dim;
    int is_bfloat16;
    float eps; /* of the norm */
} Rotary;

/* rotary.c */
void cos_sin(const float *angles, int64_t count, float *cos, float *sin); /* all [count] */

/* decoder.c */
typedef struct { /* 64-bit numbers only: Python fills it as a row of a table */
    const float *input_norm, *post_attention_norm; /* [hidden_size] */
    const float *output_norm, *down_norm;          /* likewise, or NULL: what the products give is added as it is */
    const float *qk_norm, *cos, *sin;              /* as in Rotary */
    Weight qkv, output, gate_up, down;
    void *keys, *values;
    int64_t span;
} Layer;
#define AFTER_NORM (-1)
typedef struct { /* likewise */
    const Layer *layers;
    const void *embedding; /* [vocab_size, hidden_size], of the same dtype as the KV cache */
    const float *norm; /* [hidden_size], or NULL: no norm before the output layer */
    Weight head;
    void *states;                   /* [num_slots, num_captured, hidden_size], of the same dtype as the KV cache */
    const int64_t *captured_layers; /* [num_captured]: how many layers precede a state, or AFTER_NORM */
    int64_t num_captured;
    int64_t num_layers, hidden_size, intermediate_size, num_heads, num_kv_heads, head_dim, block_size, is_bfloat16, is_gelu;
} Model;
typedef struct {
    float *logits;  /* [num_logit_rows, vocab_size] */
    float *scratch; /* [num_rows, scratch_size(model)] */
    const float *residual;        /* [num_rows, hidden_size], or NULL: the embeddings of token_ids */
    const float *attention_input; /* [num_rows, in_features of the first layer's qkv]; NULL if residual is NULL */
    const int64_t *token_ids, *logit_rows, *positions, *slots, *row_starts, *prefix_lens, *block_tables, *paths;
    int64_t num_rows, num_logit_rows, num_segments, table_len, path_len;
    float eps;
} Step;
int64_t scratch_size(const Model *model);
int decode(const Model *model, const Step *step, int num_threads); /* 0, or -1 without memory */

#endif
