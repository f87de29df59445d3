/* Attention by tiles, on an emulation of their instructions: for tests. */
#define EMULATE_TILES
#include "attention_amx.c"
