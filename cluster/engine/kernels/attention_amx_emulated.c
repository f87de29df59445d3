/* Attention by tiles, on an emulation of their instructions: for tests. */
#if defined(__x86_64__)
#define EMULATE_TILES
#include "attention_amx.c"
#endif
