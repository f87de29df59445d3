/* Draws for one width of registers. sampling.c includes this once for each, with TARGET, NAME and COUNTERS, the number of
   counters in a register. */

#if COUNTERS > 1
typedef uint64_t NAME(Words) __attribute__((vector_size(8 * COUNTERS))); /* a word of each counter */

/* The products of the lower halves. */
static inline TARGET NAME(Words) NAME(product)(NAME(Words) a, NAME(Words) b) {
#if COUNTERS == 8
    return (NAME(Words))_mm512_mul_epu32((__m512i)a, (__m512i)b);
#else
    return (NAME(Words))_mm256_mul_epu32((__m256i)a, (__m256i)b);
#endif
}

/* The 128 bits of a * m, from four products of halves. */
static inline TARGET void NAME(multiply)(NAME(Words) a, uint64_t m, NAME(Words) *high, NAME(Words) *low) {
    const uint64_t lower = 0xffffffff;
    const NAME(Words) none = {0}, m_low = none + (m & lower), m_high = none + (m >> 32), a_high = a >> 32;
    const NAME(Words) low_low = NAME(product)(a, m_low), high_low = NAME(product)(a_high, m_low);
    const NAME(Words) upper = high_low + (low_low >> 32), middle = NAME(product)(a, m_high) + (upper & lower);
    *high = NAME(product)(a_high, m_high) + (upper >> 32) + (middle >> 32);
    *low = (low_low & lower) | (middle << 32);
}
#define WORD_OF(words, counter) (words)[counter]
#else
typedef uint64_t NAME(Words);

static inline void NAME(multiply)(uint64_t a, uint64_t m, uint64_t *high, uint64_t *low) {
    const unsigned __int128 product = (unsigned __int128)a * m;
    *high = (uint64_t)(product >> 64);
    *low = (uint64_t)product;
}
#define WORD_OF(words, counter) (words)
#endif

/* The words of a chunk's tokens. Chains of rounds fill the processor where one waits for its products. */
static TARGET void NAME(random_words)(const Noise *noise, int64_t first, uint32_t *words) {
    const int64_t step = COUNTERS * CHAINS;
    for (int64_t counter = 0; counter < CHUNK / TOKENS_OF_COUNTER; counter += step) {
        NAME(Words) c[CHAINS][4];
        UNROLL for (int i = 0; i < CHAINS; i++) {
            NAME(Words) none = {0}, number = {0};
            UNROLL for (int k = 0; k < COUNTERS; k++)
                WORD_OF(number, k) = (uint64_t)(first / TOKENS_OF_COUNTER + counter + i * COUNTERS + k);
            c[i][0] = number;
            c[i][1] = none + noise->position;
            c[i][2] = c[i][3] = none;
        }
        UNROLL for (int r = 0; r < ROUNDS; r++)
            UNROLL for (int i = 0; i < CHAINS; i++) {
                NAME(Words) high0, low0, high1 = {0}, low1 = {0};
                NAME(multiply)(c[i][0], 0xD2E7470EE14C6C93u, &high0, &low0);
                if (r > 0) NAME(multiply)(c[i][2], 0xCA5A826395121157u, &high1, &low1); /* 0 at first */
                c[i][0] = high1 ^ c[i][1] ^ noise->keys[r][0];
                c[i][1] = low1;
                c[i][2] = high0 ^ c[i][3] ^ noise->keys[r][1];
                c[i][3] = low0;
            }
        uint64_t by_word[CHAINS][4][COUNTERS];
        memcpy(by_word, c, sizeof c);
        UNROLL for (int i = 0; i < CHAINS; i++)
            UNROLL for (int k = 0; k < COUNTERS; k++) {
                const uint64_t of_counter[] = {by_word[i][0][k], by_word[i][1][k], by_word[i][2][k], by_word[i][3][k]};
                memcpy(words + (counter + i * COUNTERS + k) * TOKENS_OF_COUNTER, of_counter, sizeof of_counter);
            }
    }
}
#undef WORD_OF

/* A chunk's tokens; those beyond the row have -inf. */
static TARGET void NAME(load_chunk)(const float *logits, int64_t count, float temperature, float *x) {
    if (count > CHUNK) count = CHUNK;
    for (int64_t i = count; i < CHUNK; i++) x[i] = -INFINITY;
    if (count < CHUNK || temperature == 1.0f) {
        memcpy(x, logits, (size_t)count * sizeof *x);
        logits = x;
    }
    if (temperature == 1.0f) return;
    for (int i = 0; i < CHUNK; i++) x[i] = logits[i] / temperature;
}

/* Returns the largest number; ignores NaN. */
static TARGET float NAME(largest_of)(const float *x, int count) {
    float largest[PART];
    for (int k = 0; k < PART; k++) largest[k] = -INFINITY;
    for (int i = 0; i < count; i += PART)
        for (int k = 0; k < PART; k++) largest[k] = x[i + k] > largest[k] ? x[i + k] : largest[k];
    UNROLL for (int half = PART / 2; half > 0; half /= 2)
        UNROLL for (int k = 0; k < half; k++) largest[k] = largest[k] > largest[k + half] ? largest[k] : largest[k + half];
    return largest[0];
}

/* Without noise, the logits are the scores. No token is missed: addition is monotone in float32 too, so that x plus a
   bound of the noise is not below the score. (Comparing x with a difference would round otherwise.) */
static TARGET void NAME(draw_row)(
    const float *logits, int64_t vocab_size, float temperature, const Noise *noise, Best *best) {
    float x[CHUNK], bounds[CHUNK];
    uint32_t words[CHUNK];
    for (int64_t first = 0; first < vocab_size; first += CHUNK) {
        NAME(load_chunk)(logits + first, vocab_size - first, temperature, x);
        if (!(NAME(largest_of)(x, CHUNK) + (noise == NULL ? 0 : LARGEST_NOISE) > threshold(best))) continue;
        if (noise == NULL) {
            for (int i = 0; i < CHUNK; i++)
                if (x[i] > threshold(best)) insert(best, first + i, x[i]);
            continue;
        }
        NAME(random_words)(noise, first, words);
        for (int i = 0; i < CHUNK; i++) bounds[i] = x[i] + noise_bound(words[i]);
        for (int part = 0; part < CHUNK; part += PART) {
            if (!(NAME(largest_of)(bounds + part, PART) > threshold(best))) continue;
            for (int i = part; i < part + PART; i++) {
                if (!(bounds[i] > threshold(best))) continue;
                const float score = x[i] + noise_of_word(words[i]);
                if (score > threshold(best)) insert(best, first + i, score);
            }
        }
    }
}
