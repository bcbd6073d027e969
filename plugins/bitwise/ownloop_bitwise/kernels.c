// Kernels whose result for a row depends on no other row, on no number of rows and on no number of threads.
//
// Every output is one chain of fused multiply-adds over k = 0, 1, ..., or a sum of 16 lanes by one fixed tree. All
// arithmetic is IEEE float32, so AVX-512, AVX2, NEON and plain C give the same bits: the width W of a vector decides
// how many outputs are computed side by side, never the order within one. bfloat16 is widened exactly and rounded once,
// to nearest even, at the end. With AVX512_BF16 alone, products of bfloat16 have other bits: an instruction multiplies
// pairs there, and rounds in its own way. Compile with -ffp-contract=off and without -ffast-math.
//
// Legend: M rows, N outputs and K inputs of a product; H heads of dimension D in G groups of keys and values.
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__AVX512F__)
#include <immintrin.h>
#define W 16
#define MR 12 // rows that a product holds in registers, with NR columns
#elif defined(__AVX2__) && defined(__FMA__)
#include <immintrin.h>
#define W 8
#define MR 6
#else
#if defined(__aarch64__)
#include <arm_neon.h>
#endif
#define W 4
#define MR 8
#endif
#define NR (2 * W)
#define LANES 16
#define PARTS (LANES / W)
#define INLINE static inline __attribute__((always_inline))
#define UNUSED __attribute__((unused))

typedef float vf __attribute__((vector_size(4 * W)));
typedef int32_t vi __attribute__((vector_size(4 * W)));
typedef uint32_t vu __attribute__((vector_size(4 * W)));
typedef uint16_t vh __attribute__((vector_size(2 * W)));

INLINE vf fma_of(vf a, vf b, vf c) {
#if W == 16
  return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif W == 8
  return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
  return (vf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  vf y;
  for (int i = 0; i < W; i++) y[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return y;
#endif
}
INLINE vf all(float x) { return x - (vf){0}; }
INLINE vf chosen(vi where, vf a, vf b) { return (vf)((where & (vi)a) | (~where & (vi)b)); }
INLINE vf larger(vf a, vf b) { return chosen(a > b, a, b); }

INLINE vf at(const float *p) { vf x; memcpy(&x, p, sizeof x); return x; }
INLINE void put(float *p, vf x) { memcpy(p, &x, sizeof x); }
INLINE vf widened(vh h) { return (vf)(__builtin_convertvector(h, vu) << 16); }
INLINE vh rounded(vf x) {
  vu b = (vu)x;
  return __builtin_convertvector((b + ((b >> 16) & 1) + 0x7fff) >> 16, vh);
}
// W elements from p[i] on, of which n are there; others are `rest`.
INLINE vf load(const void *p, long i, long n, int is_bf16, float rest) {
  if (n >= W) {
    if (!is_bf16) return at((const float *)p + i);
    vh h; memcpy(&h, (const uint16_t *)p + i, sizeof h); return widened(h);
  }
  vf x = all(rest);
  for (long e = 0; e < n; e++) {
    uint32_t bits = is_bf16 ? (uint32_t)((const uint16_t *)p)[i + e] << 16 : ((const uint32_t *)p)[i + e];
    memcpy((char *)&x + 4 * e, &bits, 4);
  }
  return x;
}
INLINE void store(void *p, long i, long n, int is_bf16, vf x) {
  vh h = rounded(x);
  n = n < W ? n : W;
  if (is_bf16) memcpy((uint16_t *)p + i, &h, 2 * n); else memcpy((float *)p + i, &x, 4 * n);
}

// Relative error below 3e-7 between -87 and 88; beyond, the value there.
INLINE vf exp_of(vf x) {
  x = chosen(x < -87.0f, all(-87.0f), x);
  x = chosen(x > 88.0f, all(88.0f), x);
  const vf shift = all(12582912.0f); // 1.5 x 2^23: adding it rounds to a whole number, which the low bits then hold
  vf t = fma_of(x, all(1.44269504f), shift), n = t - shift;
  vf f = fma_of(n, all(-0.693145752f), x), y = all(1.38888889e-3f);
  f = fma_of(n, all(-1.42860677e-6f), f);
  y = fma_of(y, f, all(8.33333333e-3f));
  y = fma_of(y, f, all(4.16666667e-2f));
  y = fma_of(y, f, all(1.66666667e-1f));
  y = fma_of(y, f, all(0.5f));
  y = fma_of(y, f, all(1.0f));
  y = fma_of(y, f, all(1.0f));
  return y * (vf)(((vi)t - (vi)shift + 127) << 23);
}
// cap tanh(x / cap), with an error below 2e-7 cap; a cap of 0 is none.
INLINE vf capped(vf x, float cap) {
  if (cap == 0) return x;
  vf t = exp_of(x * all(2 / cap));
  return all(cap) * ((t - all(1)) / (t + all(1)));
}
// In float64, so that the result is nearly always the float32 next to the logarithm. x is a normal number.
static float log_of(float x) {
  uint32_t bits; memcpy(&bits, &x, 4);
  int e = (int)(bits >> 23) - 127;
  bits = (bits & 0x7fffff) | 0x3f800000; memcpy(&x, &bits, 4);
  double m = x;
  if (m > 1.4142135623730951) m *= 0.5, e++;
  double s = (m - 1) / (m + 1), s2 = s * s, sum = 0;
  for (int k = 21; k >= 1; k -= 2) sum = sum * s2 + 1.0 / k;
  return (float)(e * 0.6931471805599453 + 2 * s * sum);
}
// The sum of 16 lanes: lane i with lane i + 8, then i + 4, i + 2, i + 1.
INLINE float tree(const vf *x) {
  float a[LANES];
  memcpy(a, x, sizeof a);
  for (int n = LANES / 2; n; n /= 2) for (int i = 0; i < n; i++) a[i] += a[i + n];
  return a[0];
}
INLINE float highest(const vf *x) {
  float a[LANES], most;
  memcpy(a, x, sizeof a); most = a[0];
  for (int i = 1; i < LANES; i++) most = a[i] > most ? a[i] : most;
  return most;
}

// ---- Products: y [M, N] = x [M, K] w [N, K]^T + bias [N], each output one chain over k = 0, 1, ...
// Weights are packed in panels of NR columns: of float32 one k after the other, of bfloat16 two of them in 32 bits.
static long panels_of(long N) { return (N + NR - 1) / NR; }
static long steps_of(long K, int is_bf16) { return is_bf16 ? (K + 1) / 2 : K; }
long packed_bytes(long N, long K, int is_bf16) { return panels_of(N) * NR * steps_of(K, is_bf16) * 4; }

void pack(const void *w, uint32_t *out, long N, long K, int is_bf16) {
  long steps = steps_of(K, is_bf16);
#pragma omp parallel for schedule(static) if (N * K > 32768)
  for (long p = 0; p < panels_of(N); p++)
    for (long k = 0; k < steps; k += 16) // a line of the cache of each row at a time
      for (long c = 0; c < NR; c++) {
        long n = p * NR + c;
        for (long i = k; i < k + 16 && i < steps; i++) {
          uint32_t value = 0;
          if (n < N && !is_bf16) value = ((const uint32_t *)w)[n * K + i];
          if (n < N && is_bf16) {
            const uint16_t *row = (const uint16_t *)w + n * K + 2 * i;
            value = row[0] | (2 * i + 1 < K ? (uint32_t)row[1] << 16 : 0);
          }
          out[(p * steps + i) * NR + c] = value;
        }
      }
}

// R rows of x, with sx elements between them, times K steps of a panel, added to sum [R, NR].
#define RUN(R)                                                                                                         \
  static void run_f32_##R(const float *x, long sx, const uint32_t *panel, long K, float *sum) {                        \
    vf a[R], b[R];                                                                                                     \
    for (int r = 0; r < R; r++) a[r] = at(sum + r * NR), b[r] = at(sum + r * NR + W);                                  \
    for (long k = 0; k < K; k++) {                                                                                     \
      vf w0 = at((const float *)panel + k * NR), w1 = at((const float *)panel + k * NR + W);                           \
      for (int r = 0; r < R; r++) {                                                                                    \
        vf v = all(x[r * sx + k]);                                                                                     \
        a[r] = fma_of(v, w0, a[r]), b[r] = fma_of(v, w1, b[r]);                                                        \
      }                                                                                                                \
    }                                                                                                                  \
    for (int r = 0; r < R; r++) put(sum + r * NR, a[r]), put(sum + r * NR + W, b[r]);                                  \
  }                                                                                                                    \
  UNUSED static void run_bf16_##R(const float *x, long sx, const uint32_t *panel, long K, float *sum) {                \
    vf a[R], b[R];                                                                                                     \
    for (int r = 0; r < R; r++) a[r] = at(sum + r * NR), b[r] = at(sum + r * NR + W);                                  \
    for (long k = 0; k < K; k++) {                                                                                     \
      vu u0 = (vu)at((const float *)panel + k * NR), u1 = (vu)at((const float *)panel + k * NR + W);                   \
      for (int odd = 0; odd < 2; odd++) {                                                                              \
        vf w0 = (vf)(odd ? u0 & 0xffff0000u : u0 << 16), w1 = (vf)(odd ? u1 & 0xffff0000u : u1 << 16);                 \
        for (int r = 0; r < R; r++) {                                                                                  \
          vf v = all(x[r * sx + 2 * k + odd]);                                                                         \
          a[r] = fma_of(v, w0, a[r]), b[r] = fma_of(v, w1, b[r]);                                                      \
        }                                                                                                              \
      }                                                                                                                \
    }                                                                                                                  \
    for (int r = 0; r < R; r++) put(sum + r * NR, a[r]), put(sum + r * NR + W, b[r]);                                  \
  }
// The same of pairs of bfloat16, which one instruction multiplies and adds to the sum, in an order of its own.
#ifdef __AVX512BF16__
#define DOTS 1
#define DOT(R)                                                                                                         \
  static void run_dot_##R(const void *x, long sx, const uint32_t *panel, long K, float *sum) {                         \
    __m512 a[R], b[R];                                                                                                 \
    for (int r = 0; r < R; r++) a[r] = (__m512)at(sum + r * NR), b[r] = (__m512)at(sum + r * NR + W);                  \
    for (long k = 0; k < K; k++) {                                                                                     \
      __m512bh w0 = (__m512bh)at((const float *)panel + k * NR), w1 = (__m512bh)at((const float *)panel + k * NR + W); \
      for (int r = 0; r < R; r++) {                                                                                    \
        __m512bh v = (__m512bh)_mm512_set1_epi32(((const int32_t *)x)[r * sx + k]);                                    \
        a[r] = _mm512_dpbf16_ps(a[r], v, w0), b[r] = _mm512_dpbf16_ps(b[r], v, w1);                                    \
      }                                                                                                                \
    }                                                                                                                  \
    for (int r = 0; r < R; r++) put(sum + r * NR, (vf)a[r]), put(sum + r * NR + W, (vf)b[r]);                          \
  }
DOT(1) DOT(2) DOT(4) DOT(8) DOT(12)
#define RUN_BF16(R, ...) run_dot_##R(__VA_ARGS__)
#else
#define DOTS 0
#define RUN_BF16(R, ...) run_bf16_##R(__VA_ARGS__)
#endif
RUN(1) RUN(2) RUN(4)
#if MR == 12
RUN(8) RUN(12)
#elif MR == 6
RUN(6)
#else
RUN(8)
#endif

static long run(const float *x, long sx, const uint32_t *panel, long K, float *sum, long rows, int is_bf16) {
#define TRY(R)                                                                                                         \
  if (rows >= R) {                                                                                                     \
    if (is_bf16) RUN_BF16(R, x, sx, panel, K, sum); else run_f32_##R(x, sx, panel, K, sum);                            \
    return R;                                                                                                          \
  }
#if MR == 12
  TRY(12) TRY(8)
#elif MR == 6
  TRY(6)
#else
  TRY(8)
#endif
  TRY(4) TRY(2) TRY(1)
  return 0;
}

void product(const void *x, const uint32_t *w, const void *bias, void *y, long M, long N, long K, int is_bf16) {
  const long ROWS = 96, STEPS = is_bf16 ? 192 : 384; // of a block, whose rows stay in the cache
  // What the rows of x are to the kernel: float32, or pairs of bfloat16, padded with a zero to whole pairs.
  long steps = steps_of(K, is_bf16), per = is_bf16 && !DOTS ? 2 : 1, width = steps * per;
  long blocks = (M + ROWS - 1) / ROWS;
  float *wide = (float *)x;
  int copies = is_bf16 && (!DOTS || K % 2);
  if (copies) {
    wide = malloc(M * width * 4);
#pragma omp parallel for schedule(static) if (M * K > 32768)
    for (long m = 0; m < M; m++)
      if (DOTS) {
        wide[m * width + width - 1] = 0;
        memcpy(wide + m * width, (const uint16_t *)x + m * K, 2 * K);
      } else {
        for (long k = 0; k < K; k += W) {
          vf v = load(x, m * K + k, K - k, 1, 0);
          if (width - k >= W) put(wide + m * width + k, v); else memcpy(wide + m * width + k, &v, 4 * (width - k));
        }
      }
  }
#pragma omp parallel for collapse(2) schedule(static) if (M * N * K > 65536)
  for (long b = 0; b < blocks; b++)
    for (long p = 0; p < panels_of(N); p++) {
      float sum[96 * NR] __attribute__((aligned(64)));
      long rows = M - b * ROWS < ROWS ? M - b * ROWS : ROWS;
      memset(sum, 0, rows * NR * 4);
      for (long k = 0; k < steps; k += STEPS)
        for (long m = 0; m < rows;)
          m += run(wide + (b * ROWS + m) * width + k * per, width, w + (p * steps + k) * NR,
                   steps - k < STEPS ? steps - k : STEPS, sum + m * NR, rows - m, is_bf16);
      for (long c = 0; c < NR && p * NR + c < N; c += W) {
        long n = p * NR + c, left = N - n;
        vf shift = bias ? load(bias, n, left, is_bf16, 0) : all(0);
        for (long m = 0; m < rows; m++) {
          vf v = at(sum + m * NR + c);
          store(y, (b * ROWS + m) * N + n, left, is_bf16, bias ? v + shift : v);
        }
      }
    }
  if (copies) free(wide);
}

// ---- Attention. A sequence is a list of keys in the order of their positions; a query sees the first `seen` of them,
// or with a window, of these the last `window`.
// q, out [L, H, D]; keys and values are rows `key_row` of memory, sk elements a row and sg a head. Here D is padded with
// zeros to a multiple of 16.
// A score is one chain over the dimensions, a sum of weights 16 lanes and the tree, an output one chain over the keys.
typedef struct {
  const void *q, *k, *v;
  void *out;
  const int64_t *q_row, *seen, *keys; // of this sequence
  long H, R, D, sk, sg, window;
  float scale, cap;
  int is_bf16;
} Sequence;

static long padded(long D) { return (D + LANES - 1) / LANES * LANES; }

// Scores of 4 rows of queries x [rows, D] with 16 keys [D, 16].
INLINE void score_rows(const float *x, long rows, const float *keys, long D, float scale, float cap, float *to,
                       long width) {
  vf a[4][PARTS];
  for (int e = 0; e < 4; e++) for (int i = 0; i < PARTS; i++) a[e][i] = all(0);
  for (long d = 0; d < D; d++)
    for (int e = 0; e < 4; e++) {
      vf v = all(x[(e < rows ? e : 0) * D + d]);
      for (int i = 0; i < PARTS; i++) a[e][i] = fma_of(v, at(keys + d * LANES + i * W), a[e][i]);
    }
  for (int e = 0; e < 4 && e < rows; e++)
    for (int i = 0; i < PARTS; i++) put(to + e * width + i * W, capped(a[e][i] * all(scale), cap));
}

// Weights of scores `from` to `seen` - 1 in place: exponentials below the highest, divided by their sum; 0 elsewhere.
static void soft_max(float *x, long from, long seen, long width) {
  for (long j = 0; j < from; j++) x[j] = -INFINITY;
  vf top[PARTS], sum[PARTS];
  for (int i = 0; i < PARTS; i++) top[i] = all(-INFINITY), sum[i] = all(0);
  for (long j = 0; j < width; j += W)
    top[j / W % PARTS] = larger(load(x, j, seen - j, 0, -INFINITY), top[j / W % PARTS]);
  vf most = all(highest(top));
  for (long j = 0; j < width; j += W) {
    float e[W], zero[W] = {0};
    put(e, exp_of(at(x + j) - most));
    vf kept = load(seen > j ? e : zero, 0, seen > j ? seen - j : W, 0, 0);
    for (long i = j; i < from && i < j + W; i++) kept[i - j] = 0;
    put(x + j, kept);
    sum[j / W % PARTS] = sum[j / W % PARTS] + kept;
  }
  vf inverse = all(1.0f / tree(sum));
  for (long j = 0; j < width; j += W) put(x + j, at(x + j) * inverse);
}

// Adds 16 values [16, D] with their weights to 4 rows of the output [rows, D].
INLINE void add_values(const float *weights, long width, long rows, const float *values, long D, float *out) {
  for (long d = 0; d < D; d += NR) {
    vf a[4], b[4];
    int two = d + W < D;
    for (int e = 0; e < 4; e++) {
      const float *o = out + (e < rows ? e : 0) * D + d;
      a[e] = at(o), b[e] = two ? at(o + W) : a[e];
    }
    for (long j = 0; j < LANES; j++) {
      vf v0 = at(values + j * D + d), v1 = two ? at(values + j * D + d + W) : v0;
      for (int e = 0; e < 4; e++) {
        vf p = all(weights[(e < rows ? e : 0) * width + j]);
        a[e] = fma_of(p, v0, a[e]), b[e] = fma_of(p, v1, b[e]);
      }
    }
    for (int e = 0; e < 4 && e < rows; e++) {
      put(out + e * D + d, a[e]);
      if (two) put(out + e * D + d + W, b[e]);
    }
  }
}

INLINE long first_key(const Sequence *s, long i) {
  return s->window && s->seen[i] > s->window ? s->seen[i] - s->window : 0;
}
// The queries i0 to i0 + nq of a sequence in one group of heads. `memory` has room for their heads, twice, 16 keys, and
// the scores of the keys that they see. Keys before the first of these are not read: a generator may have freed them.
static void attend_tile(const Sequence *s, long i0, long nq, long g, long most, float *memory) {
  long D = s->D, P = padded(D), R = s->R, rows = nq * R, least = most;
  for (long i = i0; i < i0 + nq; i++) least = first_key(s, i) < least ? first_key(s, i) : least;
  long start = least / LANES * LANES, width = (most - start + LANES - 1) / LANES * LANES;
  float *q = memory, *out = q + rows * P, *block = out + rows * P, *score = block + LANES * P;
  for (long r = 0; r < rows; r++)
    for (long d = 0; d < P; d += W)
      put(q + r * P + d, load(s->q, (s->q_row[i0 + r / R] * s->H + g * R + r % R) * D + d, D - d, s->is_bf16, 0));
  for (long b = 0; b < width; b += LANES) {
    for (long j = 0; j < LANES; j++)
      for (long d = 0; d < P; d += W) {
        float lane[W];
        long key = start + b + j;
        int is_there = key >= least && key < most;
        put(lane, is_there ? load(s->k, s->keys[key] * s->sk + g * s->sg + d, D - d, s->is_bf16, 0) : all(0));
        for (int e = 0; e < W; e++) block[(d + e) * LANES + j] = lane[e];
      }
    for (long r = 0; r < rows; r += 4)
      score_rows(q + r * P, rows - r, block, P, s->scale, s->cap, score + r * width + b, width);
  }
  for (long r = 0; r < rows; r++)
    soft_max(score + r * width, first_key(s, i0 + r / R) - start, s->seen[i0 + r / R] - start, width);
  memset(out, 0, rows * P * 4);
  for (long b = 0; b < width; b += LANES) {
    for (long j = 0; j < LANES; j++)
      for (long d = 0; d < P; d += W) {
        long key = start + b + j;
        int is_there = key >= least && key < most;
        put(block + j * P + d,
            is_there ? load(s->v, s->keys[key] * s->sk + g * s->sg + d, D - d, s->is_bf16, 0) : all(0));
      }
    for (long r = 0; r < rows; r += 4) add_values(score + r * width + b, width, rows - r, block, P, out + r * P);
  }
  for (long r = 0; r < rows; r++)
    for (long d = 0; d < D; d += W)
      store(s->out, (s->q_row[i0 + r / R] * s->H + g * R + r % R) * D + d, D - d, s->is_bf16, at(out + r * P + d));
}

void attend(const void *q, const void *k, const void *v, void *out, const int64_t *q_start, const int64_t *q_row,
            const int64_t *seen, const int64_t *k_start, const int64_t *key_row, long S, long H, long G, long D,
            long sk, long sg, long window, float scale, float cap, int is_bf16) {
  const long TILE = 16;
  long tiles = 0, n = 0, R = H / G;
  for (long s = 0; s < S; s++) tiles += (q_start[s + 1] - q_start[s] + TILE - 1) / TILE;
  int64_t *of = malloc(2 * tiles * 8 + 8), *first = of + tiles;
  for (long s = 0; s < S; s++) for (long i = q_start[s]; i < q_start[s + 1]; i += TILE) of[n] = s, first[n++] = i;
#pragma omp parallel
  {
    float *memory = 0;
    long room = 0;
#pragma omp for collapse(2) schedule(dynamic, 1)
    for (long t = 0; t < tiles; t++)
      for (long g = 0; g < G; g++) {
        long s = of[t], i0 = first[t], nq = q_start[s + 1] - i0 < TILE ? q_start[s + 1] - i0 : TILE, most = 0;
        for (long i = i0; i < i0 + nq; i++) most = seen[i] > most ? seen[i] : most;
        long need = nq * R * (2 * padded(D) + (most + LANES - 1) / LANES * LANES) + LANES * padded(D);
        if (need > room) free(memory), memory = malloc((room = need) * 4);
        Sequence sequence = {q, k, v, out, q_row, seen, key_row + k_start[s], H, R, D, sk, sg, window, scale, cap, is_bf16};
        attend_tile(&sequence, i0, nq, g, most, memory);
      }
    free(memory);
  }
  free(of);
}

// ---- Row by row: norm, activation, rotation, log of the sum of exponentials.
// y = x / sqrt(mean(x^2) + eps) * (w + shift); the sum has 16 lanes.
void rms_norm(const void *x, const void *w, void *y, long M, long D, float eps, float shift, int is_bf16) {
#pragma omp parallel for schedule(static) if (M * D > 32768)
  for (long m = 0; m < M; m++) {
    vf sum[PARTS];
    for (int i = 0; i < PARTS; i++) sum[i] = all(0);
    for (long d = 0; d < D; d += W) {
      vf a = load(x, m * D + d, D - d, is_bf16, 0);
      sum[d / W % PARTS] = fma_of(a, a, sum[d / W % PARTS]);
    }
    vf factor = all(1.0f / __builtin_sqrtf(tree(sum) / (float)D + eps));
    for (long d = 0; d < D; d += W) {
      vf a = load(x, m * D + d, D - d, is_bf16, 0);
      store(y, m * D + d, D - d, is_bf16, a * factor * (load(w, d, D - d, is_bf16, 0) + all(shift)));
    }
  }
}
// y [M, D] = g / (1 + exp(-z)) * u, with sx elements between the rows of g and of u. For SiLU z is g; for GELU by tanh
// (https://arxiv.org/abs/1606.08415, section 2) it is 2 sqrt(2 / pi) (g + 0.044715 g^3).
void gate_mul(const void *g, const void *u, void *y, long M, long D, long sx, int is_gelu, int is_bf16) {
#pragma omp parallel for schedule(static) if (M * D > 32768)
  for (long m = 0; m < M; m++)
    for (long d = 0; d < D; d += W) {
      vf a = load(g, m * sx + d, D - d, is_bf16, 0), z = a;
      if (is_gelu) z = all(1.59576912f) * fma_of(all(0.044715f) * a * a, a, a);
      vf e = exp_of(all(0) - z);
      store(y, m * D + d, D - d, is_bf16, a / (all(1) + e) * load(u, m * sx + d, D - d, is_bf16, 0));
    }
}
void soft_cap(const void *x, void *y, long n, float cap, int is_bf16) {
#pragma omp parallel for schedule(static) if (n > 32768)
  for (long i = 0; i < n; i += W) store(y, i, n - i, is_bf16, capped(load(x, i, n - i, is_bf16, 0), cap));
}
// x [M, H, D] with sx elements between rows; table [positions, D]: D/2 cosines, then D/2 sines. Rotates halves.
void rotate(const void *x, const float *table, const int64_t *position, void *y, long M, long H, long D, long sx,
            int inverse, int is_bf16) {
  long h = D / 2;
#pragma omp parallel for schedule(static) if (M * H * D > 32768)
  for (long m = 0; m < M; m++)
    for (long i = 0; i < H; i++)
      for (long d = 0; d < h; d += W) {
        vf c = load(table, position[m] * D + d, h - d, 0, 0), s = load(table, position[m] * D + h + d, h - d, 0, 0);
        vf a = load(x, m * sx + i * D + d, h - d, is_bf16, 0), b = load(x, m * sx + i * D + h + d, h - d, is_bf16, 0);
        if (inverse) s = all(0) - s;
        store(y, (m * H + i) * D + d, h - d, is_bf16, fma_of(all(0) - b, s, a * c));
        store(y, (m * H + i) * D + h + d, h - d, is_bf16, fma_of(a, s, b * c));
      }
}
// Of x[start[m]] to x[end[m] - 1], times scale[m] if there are scales: the log of the sum of exponentials and, unless
// null, the mean of the scaled elements under their softmax. That sum has 64 lanes, which four by four become 16.
void log_sum_exp(const void *x, const int64_t *start, const int64_t *end, const float *scale, float *lse, float *mean,
                 long M, int is_bf16) {
#pragma omp parallel for schedule(static)
  for (long m = 0; m < M; m++) {
    long from = start[m], V = end[m] - from;
    vf top[PARTS], sum[4 * PARTS], dot[PARTS], f = all(scale ? scale[m] : 1);
    for (int i = 0; i < PARTS; i++) top[i] = all(-INFINITY), dot[i] = all(0);
    for (int i = 0; i < 4 * PARTS; i++) sum[i] = all(0);
    for (long d = 0; d < V; d += W) {
      vf a = load(x, from + d, V - d, is_bf16, 0) * f;
      if (V - d < W) { float e[W]; put(e, a); a = load(e, 0, V - d, 0, -INFINITY); }
      top[d / W % PARTS] = larger(a, top[d / W % PARTS]);
    }
    float most = highest(top);
    for (long d = 0; d < V; d += W) {
      vf a = load(x, from + d, V - d, is_bf16, 0) * f - all(most), p = exp_of(a);
      if (V - d < W) { float e[W]; put(e, p); p = load(e, 0, V - d, 0, 0); }
      sum[d / W % (4 * PARTS)] = sum[d / W % (4 * PARTS)] + p;
      if (mean) dot[d / W % PARTS] = fma_of(p, a, dot[d / W % PARTS]);
    }
    for (int i = 0; i < PARTS; i++) sum[i] = sum[i] + sum[i + PARTS] + (sum[i + 2 * PARTS] + sum[i + 3 * PARTS]);
    float total = tree(sum);
    lse[m] = most + log_of(total);
    if (mean) mean[m] = most + tree(dot) / total;
  }
}

// Adds exp(x[i] - x[0]) for i = 0, 1, ... below n in float64, as long as the sum is less than `limit`; counts them.
static double add_exps(const float *x, long n, double limit, int64_t *count) {
  double sum = 0;
  *count = 0;
  for (long j = 0; j < n && sum < limit; j += W) {
    float e[W];
    put(e, exp_of(load(x, j, n - j, 0, 0) - all(x[0])));
    for (long i = 0; i < W && j + i < n && sum < limit; i++) sum += e[i], ++*count;
  }
  return sum;
}
// Of x [M, K], which falls along each row: how many of the first k[m] elements have p[m] of the sum of exponentials.
void nucleus(const float *x, const int64_t *k, const float *p, int64_t *count, long M, long K) {
#pragma omp parallel for schedule(static)
  for (long m = 0; m < M; m++) {
    const float *row = x + m * K;
    long n = k[m] < K ? k[m] : K;
    while (n > 1 && row[n - 1] == -INFINITY) n--;
    double total = add_exps(row, n, INFINITY, count + m);
    if (p[m] < 1) add_exps(row, n, p[m] * total, count + m);
  }
}
