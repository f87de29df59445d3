/* NEON on ARM; elsewhere what every processor of its kind has, which may round a product and its sum by a function. */
#define WIDTH 4
#define TARGET
#include "portable.h"
