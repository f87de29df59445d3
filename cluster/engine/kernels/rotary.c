/*
 * Cosines and sines of the rotary embedding, the same on every processor: libraries differ in last bits. In double
 * precision, in an order that is fixed here, and rounded once.
 */
#include <stdint.h>

#include "kernels.h"

/* The sum of the three is pi / 2. The first two have 33 bits, so their products with up to 2^20 quarter turns are exact. */
#define HALF_PI_1 0x1.921fb544p+0
#define HALF_PI_2 0x1.0b4611a6p-34
#define HALF_PI_3 0x1.3198a2e037073p-69
#define TWO_OVER_PI 0x1.45f306dc9c883p-1
#define ROUNDER 0x1.8p52 /* adding and subtracting it rounds to an integer */

/* Polynomials for -pi/4 to pi/4, with errors below 2^-57 (K. C. Ng, fdlibm, 1993). */
static double sine(double x) {
    const double z = x * x;
    double p = 1.58969099521155010221e-10;
    p = p * z + -2.50507602534068634195e-08;
    p = p * z + 2.75573137070700676789e-06;
    p = p * z + -1.98412698298579493134e-04;
    p = p * z + 8.33333333332248946124e-03;
    p = p * z + -1.66666666666666324348e-01;
    return x + x * z * p;
}

static double cosine(double x) {
    const double z = x * x;
    double p = -1.13596475577881948265e-11;
    p = p * z + 2.08757232129817482790e-09;
    p = p * z + -2.75573143513906633035e-07;
    p = p * z + 2.48015872894767294178e-05;
    p = p * z + -1.38888888888741095749e-03;
    p = p * z + 4.16666666666666019037e-02;
    return 1.0 - (0.5 * z - z * z * p);
}

void cos_sin(const float *angles, int64_t count, float *cos, float *sin) {
    for (int64_t i = 0; i < count; i++) {
        const double angle = angles[i], quarters = (angle * TWO_OVER_PI + ROUNDER) - ROUNDER;
        const double rest = ((angle - quarters * HALF_PI_1) - quarters * HALF_PI_2) - quarters * HALF_PI_3;
        const int64_t quadrant = (int64_t)quarters & 3;
        const double c = cosine(rest), s = sine(rest);
        cos[i] = (float)(quadrant == 0 ? c : quadrant == 1 ? -s : quadrant == 2 ? -c : s);
        sin[i] = (float)(quadrant == 0 ? s : quadrant == 1 ? c : quadrant == 2 ? -s : -c);
    }
}
