/*
 * Draws by the Gumbel-max rule: the tokens with the largest x + g of a row, where x is a logit over the temperature
 * and g the noise that `noise.py` defines. Its results are those of computing every g.
 */
#ifndef OUTRIDER_SAMPLING_H
#define OUTRIDER_SAMPLING_H

#include <stdint.h>

#define MAX_WIDTH 16 /* tokens of a row that can be asked for */

typedef struct { /* 64-bit numbers only: Python packs it */
    const float *logits; /* [num_rows, vocab_size] */
    int64_t num_rows;
    uint64_t key[2];     /* least significant word first */
    uint64_t position;   /* of the first row's draw; the next row draws at the next */
    double temperature;  /* 0: no noise, the logits as they are */
} Run;

/* ids and scores [rows of all runs, width], largest score first; among equals the lowest ID. width is at most
   vocab_size and MAX_WIDTH. */
void draw(const Run *runs, int64_t num_runs, int64_t vocab_size, int64_t width, int64_t *ids, float *scores);

#endif
