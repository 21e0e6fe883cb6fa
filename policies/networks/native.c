/* Forward and backward passes of small networks on one thread of a CPU: see native.py.

   Matrices are row-major. Products are those of the BLAS that PyTorch uses, but for those of packed matrices, and of
   others on processors of AMD with AVX-512; what stands between two products is one pass over memory. R rows of a batch, E members of an ensemble, L layers; numbers are float32. */

#include <math.h>
#include <stdint.h>
#include <string.h>
#ifdef __FMA__
#include <immintrin.h>
#endif

typedef void (*gemm_t)(const char *, const char *, const int *, const int *, const int *, const float *,
                       const float *, const int *, const float *, const int *, const float *, float *, const int *);

#define INLINE static inline __attribute__((always_inline))

static gemm_t gemm;

/* Tiles of a product C (m, n) = A B that stay in registers, from panels of B: its rows, a tile's columns of each. */

#ifdef __AVX512F__
enum { LANES = 16, VECTORS = 4 };
#else
enum { LANES = 8, VECTORS = 2 };
#endif
enum { TILE_ROWS = 6, PANEL = LANES * VECTORS, DEPTH = 512 };

typedef float lanes_t __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

/* a b + c, rounded once in every tile: compilers choose for some processors by the shape of a loop. */
INLINE lanes_t fused(float a, lanes_t b, lanes_t c) {
#ifdef __AVX512F__
    return (lanes_t)_mm512_fmadd_ps(_mm512_set1_ps(a), (__m512)b, (__m512)c);
#elif defined __FMA__
    return (lanes_t)_mm256_fmadd_ps(_mm256_set1_ps(a), (__m256)b, (__m256)c);
#else
    return c + a * b;
#endif
}

/* A tile of C: steps of a_row between rows of A and a_k along them; the panel b has `vectors` in a row. */
INLINE void tile(int rows, int vectors, int depth, const float *a, long a_row, long a_k, const float *b, int is_added,
                 float *c, long c_row, int columns) {
    lanes_t sums[TILE_ROWS][VECTORS];
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++) sums[r][v] = (lanes_t){0};
    for (int i = 0; i < depth; i++, a += a_k, b += vectors * LANES)
        for (int r = 0; r < rows; r++)
            for (int v = 0; v < vectors; v++) sums[r][v] = fused(a[r * a_row], *(const lanes_t *)(b + v * LANES), sums[r][v]);
    for (int r = 0; r < rows; r++, c += c_row) {
        if (columns == vectors * LANES) {
            for (int v = 0; v < vectors; v++) {
                lanes_t *to = (lanes_t *)(c + v * LANES);
                if (is_added) sums[r][v] += *to;
                *to = sums[r][v];
            }
            continue;
        }
        float line[PANEL];
        for (int v = 0; v < vectors; v++) *(lanes_t *)(line + v * LANES) = sums[r][v];
        for (int j = 0; j < columns; j++) c[j] = is_added ? c[j] + line[j] : line[j];
    }
}

INLINE void over_tiles(int vectors, int m, int depth, const float *a, long a_row, long a_k, const float *b, int is_added,
                       float *c, long c_row, int columns) {
    for (; m >= TILE_ROWS; m -= TILE_ROWS, a += TILE_ROWS * a_row, c += TILE_ROWS * c_row)
        tile(TILE_ROWS, vectors, depth, a, a_row, a_k, b, is_added, c, c_row, columns);
    if (m == 5) tile(5, vectors, depth, a, a_row, a_k, b, is_added, c, c_row, columns);
    if (m == 4) tile(4, vectors, depth, a, a_row, a_k, b, is_added, c, c_row, columns);
    if (m == 3) tile(3, vectors, depth, a, a_row, a_k, b, is_added, c, c_row, columns);
    if (m == 2) tile(2, vectors, depth, a, a_row, a_k, b, is_added, c, c_row, columns);
    if (m == 1) tile(1, vectors, depth, a, a_row, a_k, b, is_added, c, c_row, columns);
}

#ifdef __AVX512F__

typedef int32_t places_t __attribute__((vector_size(4 * LANES)));

/* Write a square of LANES numbers turned, by exchanges between rows that are 1, 2, 4 and 8 apart. */
INLINE void turn_square(const float *from, long from_row, float *to, long to_row) {
    lanes_t row[LANES];
    for (int i = 0; i < LANES; i++) row[i] = *(const lanes_t *)(from + i * from_row);
#pragma GCC unroll 4
    for (int apart = 1; apart < LANES; apart *= 2) {
        places_t low, high;
        for (int j = 0; j < LANES; j++) low[j] = j & apart ? LANES + j - apart : j, high[j] = low[j] + apart;
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++)
            if (!(i & apart)) {
                const lanes_t first = row[i], second = row[i + apart];
                row[i] = __builtin_shuffle(first, second, low);
                row[i + apart] = __builtin_shuffle(first, second, high);
            }
    }
    for (int i = 0; i < LANES; i++) *(lanes_t *)(to + i * to_row) = row[i];
}

#endif

/* Copy `depth` rows of `columns` numbers of B to a panel of whole vectors, filled with zeros. */
static void copy_panel(int bt, int depth, int columns, int width, const float *b, long b_row, float *panel) {
    if (!bt) {
        for (int i = 0; i < depth; i++) {
            memcpy(panel + (long)i * width, b + i * b_row, columns * sizeof *b);
            memset(panel + (long)i * width + columns, 0, (width - columns) * sizeof *b);
        }
        return;
    }
    for (int j = 0; j < width; j += LANES) {
        int turned = 0;
#ifdef __AVX512F__
        if (columns - j >= LANES)
            for (; turned + LANES <= depth; turned += LANES)
                turn_square(b + j * b_row + turned, b_row, panel + (long)turned * width + j, width);
#endif
        for (int i = turned; i < depth; i++)
            for (int l = j; l < j + LANES; l++) panel[(long)i * width + l] = l < columns ? b[l * b_row + i] : 0;
    }
}

/* Tiles of as many vectors as `columns` need. */
INLINE void over_columns(int m, int depth, const float *a, long a_row, long a_k, const float *panel, int is_added,
                         float *c, long c_row, int columns) {
#ifdef __AVX512F__
    if (columns > 3 * LANES)
        over_tiles(4, m, depth, a, a_row, a_k, panel, is_added, c, c_row, columns);
    else if (columns > 2 * LANES)
        over_tiles(3, m, depth, a, a_row, a_k, panel, is_added, c, c_row, columns);
    else
#endif
    if (columns > LANES)
        over_tiles(2, m, depth, a, a_row, a_k, panel, is_added, c, c_row, columns);
    else
        over_tiles(1, m, depth, a, a_row, a_k, panel, is_added, c, c_row, columns);
}

/* Numbers of a packed matrix: panels of whole vectors. */
static int panel_width(int columns) { return (columns + LANES - 1) / LANES * LANES; }

/* Write B = W^T (k, n), with W (n, k), as panels; `to` holds k times n rounded up to LANES. */
void pack(int n, int k, int w_row, const float *w, float *to) {
    for (int j = 0; j < n; j += PANEL) {
        const int columns = n - j < PANEL ? n - j : PANEL, width = panel_width(columns);
        copy_panel(1, k, columns, width, w + (long)j * w_row, w_row, to);
        to += (long)k * width;
    }
}

/* C (m, n) += A (m, k) B, rows c_row and a_row apart. A row of C is the same whatever m. */
static void add_packed(int m, int n, int k, const float *a, long a_row, const float *b, float *c, long c_row) {
    for (int j = 0; j < n; j += PANEL) {
        const int columns = n - j < PANEL ? n - j : PANEL;
        over_columns(m, k, a, a_row, 1, b, 1, c + j, c_row, columns);
        b += (long)k * panel_width(columns);
    }
}

#ifdef __AVX512F__

static int is_own; /* whether products are these */

/* Products on processors of AMD, for which Intel's library scales C, copies A and pads n. */
static void own_product(int at, int bt, int m, int n, int k, const float *a, long a_row, const float *b, long b_row,
                        float beta, float *c, long c_row) {
    float panel[DEPTH * PANEL] __attribute__((aligned(64)));
    const int blocks = (k + DEPTH - 1) / DEPTH, most = (k + blocks - 1) / blocks;
    for (int i = 0; i < k; i += most) {
        const int depth = k - i < most ? k - i : most, is_added = i || beta != 0;
        const float *from = a + (at ? i * a_row : i);
        for (int j = 0; j < n; j += PANEL) {
            const int columns = n - j < PANEL ? n - j : PANEL;
            copy_panel(bt, depth, columns, panel_width(columns), b + (bt ? j * b_row + i : i * b_row + j), b_row, panel);
            if (at)
                over_columns(m, depth, from, 1, a_row, panel, is_added, c + j, c_row, columns);
            else
                over_columns(m, depth, from, a_row, 1, panel, is_added, c + j, c_row, columns);
        }
    }
}

#endif

void use_gemm(void *function) {
    gemm = (gemm_t)function;
#ifdef __AVX512F__
    __builtin_cpu_init();
    is_own = __builtin_cpu_is("amd");
#endif
}

/* C (m, n) = A B + beta C; at: A is stored (k, m); bt: B is stored (n, k); rows are *_row numbers apart; beta is 0 or 1.
   Fortran reads rows as columns. */
static void multiply_apart(int at, int bt, int m, int n, int k, const float *a, int a_row, const float *b, int b_row,
                           float beta, float *c, int c_row) {
    const float one = 1.0f;
#ifdef __AVX512F__
    if (is_own && n >= 8 && k >= LANES && m >= (bt ? 64 : 8)) { /* elsewhere copies cost more than they save */
        own_product(at, bt, m, n, k, a, a_row, b, b_row, beta, c, c_row);
        return;
    }
#endif
    gemm(bt ? "T" : "N", at ? "T" : "N", &n, &m, &k, &one, b, &b_row, a, &a_row, &beta, c, &c_row);
}

static void multiply(int at, int bt, int m, int n, int k, const float *a, const float *b, float beta, float *c) {
    multiply_apart(at, bt, m, n, k, a, at ? m : k, b, bt ? k : n, beta, c, n);
}

/* tanh as a rational function (the coefficients of Eigen), within 3 units of the last place. */
static inline float tanh_of(float x) {
    const float limit = 7.90531110763549805f;
    float y = x > limit ? limit : x;
    y = y < -limit ? -limit : y; /* NaN stays */
    const float s = y * y;
    float p = -2.76076847742355e-16f;
    p = p * s + 2.00018790482477e-13f;
    p = p * s - 8.60467152213735e-11f;
    p = p * s + 5.12229709037114e-08f;
    p = p * s + 1.48572235717979e-05f;
    p = p * s + 6.37261928875436e-04f;
    p = p * s + 4.89352455891786e-03f;
    float q = 1.19825839466702e-06f;
    q = q * s + 1.18534705686654e-04f;
    q = q * s + 2.26843463243900e-03f;
    q = q * s + 4.89352518554385e-03f;
    return y * p / q;
}

/* e^x for x in [-87, 20], by a polynomial of degree 6 on [-ln 2 / 2, ln 2 / 2]. */
static inline float exp_of(float x) {
    float y = x > 20.0f ? 20.0f : x;
    y = y < -87.0f ? -87.0f : y;
    const float shifted = y * 1.44269504f + 12582912.0f; /* rounds: 1.5 2^23 */
    const float whole = shifted - 12582912.0f;
    uint32_t bits;
    memcpy(&bits, &shifted, sizeof bits);
    bits = (bits + 127) << 23; /* the low bits of `shifted` are the whole number */
    const float r = (y - whole * 0.693359375f) + whole * 2.12194440e-4f;
    float p = 1.0f / 720;
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    float power;
    memcpy(&power, &bits, sizeof power);
    return p * power;
}

/* Mish(x) = x tanh(softplus(x)) = x n / (n + 2) with w = e^x, n = w (w + 2); x from 20 on, 0 to rounding below -87. */
static inline float mish_of(float x) {
    const float w = exp_of(x), n = w * (w + 2), low = x < -87.0f ? -87.0f : x;
    const float y = low * n / (n + 2);
    return x > 20.0f ? x : y;
}

static inline float mish_slope(float x) {
    const float w = exp_of(x), n = w * (w + 2), inverse = 1 / (n + 2), low = x < -87.0f ? -87.0f : x;
    const float slope = n * inverse + low * (4 * w * (w + 1) * inverse * inverse);
    return x > 20.0f ? 1.0f : slope;
}

/* 1 / sqrt(variance + eps), which is no number if the variance is none or too large for one. */
static inline float inverse_of(float variance, float eps) { return 1 / sqrtf(variance + eps) + 0 * variance; }

/* x (1 + tanh(c (x + 0.044715 x^3))) / 2 with c = sqrt(2 / pi) is x p with p = 1 / (1 + w), w = e^(-2 c (...)); it is
   0 or x to rounding beyond 10. */
static inline float gelu_of(float x) {
    const float w = exp_of(-1.59576912f * x * (1 + 0.044715f * x * x)), y = x / (1 + w);
    return x < -10.0f ? 0.0f : x > 10.0f ? x : y;
}

static inline float gelu_slope(float x) {
    const float square = x * x, w = exp_of(-1.59576912f * x * (1 + 0.044715f * square)), p = 1 / (1 + w);
    const float slope = p + x * (1.59576912f * (1 + 0.134145f * square)) * (w * p * p);
    return x < -10.0f ? 0.0f : x > 10.0f ? 1.0f : slope;
}

/* x / (1 + e^-x), and its slope; 0 or x to rounding beyond 87 and 20. */
static inline float silu_of(float x) {
    const float low = x < -87.0f ? -87.0f : x, w = exp_of(low), y = low * w / (1 + w);
    return x > 20.0f ? x : y;
}

static inline float silu_slope(float x) {
    const float low = x < -87.0f ? -87.0f : x, w = exp_of(low), p = 1 / (1 + w);
    const float slope = w * p * (1 + low * p);
    return x > 20.0f ? 1.0f : slope;
}

enum { RELU, TANH, GELU, MISH, SILU };

/* Whether the slope is a function of the value; of the others it is one of the argument. */
static inline int keeps_value(int kind) { return kind == RELU || kind == TANH; }

static inline void activate(int kind, int n, float *h) {
    if (kind == RELU)
        for (int j = 0; j < n; j++) h[j] = h[j] < 0 ? 0 : h[j];
    else if (kind == TANH)
        for (int j = 0; j < n; j++) h[j] = tanh_of(h[j]);
    else if (kind == GELU)
        for (int j = 0; j < n; j++) h[j] = gelu_of(h[j]);
    else if (kind == MISH)
        for (int j = 0; j < n; j++) h[j] = mish_of(h[j]);
    else
        for (int j = 0; j < n; j++) h[j] = silu_of(h[j]);
}

/* grad times the slope of the activation; h: its value or its argument, see keeps_value. */
static inline void through_activation(int kind, int n, const float *h, float *grad) {
    if (kind == RELU)
        for (int j = 0; j < n; j++) grad[j] = h[j] <= 0 ? 0 : grad[j];
    else if (kind == TANH)
        for (int j = 0; j < n; j++) grad[j] *= 1 - h[j] * h[j];
    else if (kind == GELU)
        for (int j = 0; j < n; j++) grad[j] *= gelu_slope(h[j]);
    else if (kind == MISH)
        for (int j = 0; j < n; j++) grad[j] *= mish_slope(h[j]);
    else
        for (int j = 0; j < n; j++) grad[j] *= silu_slope(h[j]);
}

/* z becomes (z - mean) / deviation; returns 1 / deviation. */
static inline float normalise(int n, float eps, float *z) {
    float sum = 0, squares = 0;
#pragma omp simd reduction(+ : sum)
    for (int j = 0; j < n; j++) sum += z[j];
    const float mean = sum / n;
#pragma omp simd reduction(+ : squares)
    for (int j = 0; j < n; j++) {
        z[j] -= mean;
        squares += z[j] * z[j];
    }
    const float inverse = inverse_of(squares / n, eps);
    for (int j = 0; j < n; j++) z[j] *= inverse;
    return inverse;
}

/* grad, of scale unit + shift, becomes that of what was normalised to unit. */
static inline void through_norm(int n, const float *scale, const float *unit, float inverse, float *grad) {
    float sum = 0, along = 0;
#pragma omp simd reduction(+ : sum, along)
    for (int j = 0; j < n; j++) {
        grad[j] *= scale[j];
        sum += grad[j];
        along += grad[j] * unit[j];
    }
    const float mean = sum / n, slope = along / n;
    for (int j = 0; j < n; j++) grad[j] = inverse * (grad[j] - mean - unit[j] * slope);
}

enum { BARE, NORM_BEFORE, NORM_AFTER }; /* the activation */

/* Members of ensembles lie behind each other: weights (E, in, out), or (E, out, in) if transposed. Each `sharing` of
   them read the same rows of x (E / sharing, R, in). dims (L + 1); parts: weights and biases of L layers, then, if
   normed, scales and shifts of L - 1; hidden: what the next layer reads, of members, layers, rows; steep: as hidden,
   what the slope of the activation is computed from, where that is not hidden; unit: as hidden, before scale and
   shift; inverse (E, L - 1, R). */
void stack_forward(const int *dims, int layers, int members, int sharing, int rows, int transposed, int kind,
                   int normed, float eps, const float *x, const float **parts, float *hidden, float *steep,
                   float *unit, float *inverse, float *out) {
    const float **weight = parts, **bias = parts + layers, **scale = parts + 2 * layers;
    const float **shift = scale + layers - 1;
    for (int e = 0; e < members; e++) {
        const float *h = x + (long)(e / sharing) * rows * dims[0];
        for (int i = 0; i < layers; i++) {
            const int k = dims[i], n = dims[i + 1], is_last = i == layers - 1;
            const float *b = bias[i] + (long)e * n;
            float *y = is_last ? out + (long)e * rows * n : hidden;
            multiply(0, transposed, rows, n, k, h, weight[i] + (long)e * k * n, 0, y);
            for (int r = 0; r < rows; r++) {
                float *z = y + (long)r * n;
                for (int j = 0; j < n; j++) z[j] += b[j];
                if (is_last) continue;
                for (int part = 0; part < 2; part++) {
                    if (part == (normed == NORM_BEFORE)) {
                        if (!keeps_value(kind)) memcpy(steep, z, n * sizeof *z), steep += n;
                        activate(kind, n, z);
                        if (keeps_value(kind) && normed == NORM_AFTER) memcpy(steep, z, n * sizeof *z), steep += n;
                    } else if (normed) {
                        const float *s = scale[i] + (long)e * n, *t = shift[i] + (long)e * n;
                        *inverse++ = normalise(n, eps, z);
                        memcpy(unit, z, n * sizeof *z);
                        unit += n;
                        for (int j = 0; j < n; j++) z[j] = s[j] * z[j] + t[j];
                    }
                }
            }
            if (!is_last) hidden += (long)rows * n;
            h = y;
        }
    }
}

static void add_rows(int rows, int n, const float *x, float *sum) {
    memset(sum, 0, n * sizeof *sum);
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < n; j++) sum[j] += x[(long)r * n + j];
}

enum { NARROW = 32 }; /* inputs of a layer, whose weight gradient some processors form six times as fast turned */

/* Gradients of the parts lie as those, or are null; grad (E, R, out); x_grad as x, or null; work holds two matrices of
   R rows of the widest hidden layer: the gradient behind a layer, and what is made of it. */
void stack_backward(const int *dims, int layers, int members, int sharing, int rows, int transposed, int kind,
                    int normed, const float *x, const float **parts, const float *hidden, const float *steep,
                    const float *unit, const float *inverse, const float *grad, float **part_grads, float *x_grad,
                    float *work, long work_size) {
    const float **weight = parts, **scale = parts + 2 * layers;
    const int is_hidden = keeps_value(kind) && normed != NORM_AFTER; /* what `steep` would be */
    long width = 0;
    for (int i = 1; i < layers; i++) width += dims[i];
    for (int e = 0; e < members; e++) {
        const long end = (e + 1) * rows * width;
        const float *h = hidden + end, *u = unit + end, *a = steep + end;
        const float *g = grad + (long)e * rows * dims[layers];
        for (int i = layers - 1; i >= 0; i--) {
            const int k = dims[i], n = dims[i + 1];
            const float *w = weight[i] + (long)e * k * n;
            if (i) h -= (long)rows * k, u -= (long)rows * k, a -= (long)rows * k;
            const long first = (long)(e / sharing) * rows * dims[0];
            const float *in = i ? h : x + first;
            if (part_grads) {
                float *wg = part_grads[i] + (long)e * k * n;
                if (transposed && k <= NARROW && k <= rows && i < layers - 1) { /* k n numbers fit the free half of work */
                    float *turned = work + (i % 2) * work_size;
                    multiply(1, 0, k, n, rows, in, g, 0, turned);
                    for (int j = 0; j < n; j++)
                        for (int c = 0; c < k; c++) wg[(long)j * k + c] = turned[(long)c * n + j];
                } else if (transposed)
                    multiply(1, 0, n, k, rows, g, in, 0, wg);
                else
                    multiply(1, 0, k, n, rows, in, g, 0, wg);
                if (i == layers - 1) add_rows(rows, n, g, part_grads[layers + i] + (long)e * n);
            }
            if (!i) {
                if (x_grad) multiply(0, !transposed, rows, k, n, g, w, e % sharing ? 1 : 0, x_grad + first);
                break;
            }
            float *back = work + (i % 2) * work_size;
            multiply(0, !transposed, rows, k, n, g, w, 0, back);
            float *sg = normed && part_grads ? part_grads[2 * layers + i - 1] + (long)e * k : 0;
            float *tg = sg ? part_grads[3 * layers + i - 2] + (long)e * k : 0;
            float *sum = part_grads ? part_grads[layers + i - 1] + (long)e * k : 0; /* of the layer below */
            if (sg) memset(sg, 0, k * sizeof *sg), memset(tg, 0, k * sizeof *tg);
            if (sum) memset(sum, 0, k * sizeof *sum);
            for (int r = 0; r < rows; r++) {
                float *b = back + (long)r * k;
                const float *v = u + (long)r * k;
                for (int part = 0; part < 2; part++) {
                    if (part == (normed == NORM_AFTER)) {
                        through_activation(kind, k, (is_hidden ? h : a) + (long)r * k, b);
                    } else if (normed) {
                        if (sg)
                            for (int j = 0; j < k; j++) tg[j] += b[j], sg[j] += b[j] * v[j];
                        const float factor = inverse[((long)e * (layers - 1) + i - 1) * rows + r];
                        through_norm(k, scale[i - 1] + (long)e * k, v, factor, b);
                    }
                }
                if (sum)
                    for (int j = 0; j < k; j++) sum[j] += b[j];
            }
            g = back;
        }
    }
}

enum { BLOCK = 256 }; /* rows that stay in a cache between passes */

/* One row of a table, or the one that every row reads. */
static inline const float *row_of(const float *table, const int64_t *row, long r, int n) {
    return table + (row ? row[r] : 0) * n;
}

/* A residual network of one block whose last layers are one (see residual.py): z = x W' + the rows of up to two tables,
   h = a(z[:H]), u = a(h A' + b), y = z[H:] + u F'. x (R, K); W (H + out, K), its rows w_row apart; A (H, H), F (out, H).
   A table has `table_rows`, of which all read the first if `row` is null, and is missing if null. z, with h in place of
   what it is made of, and u are kept. Returns whether every row is in its table. */
int residual_forward(int rows, int k, int width, int out, int kind, int w_row, int table_rows, int other_rows,
                     const float *x, const float *w, const float *table, const int64_t *row, const float *other,
                     const int64_t *other_row, const float *a, const float *b, const float *f, float *z, float *u,
                     float *y) {
    const int n = width + out;
    for (int r = 0; r < rows; r++)
        if ((row && (row[r] < 0 || row[r] >= table_rows)) || (other_row && (other_row[r] < 0 || other_row[r] >= other_rows)))
            return 0;
    for (int first = 0; first < rows; first += BLOCK) {
        const int size = rows - first < BLOCK ? rows - first : BLOCK;
        float *zs = z + (long)first * n, *us = u + (long)first * width, *ys = y + (long)first * out;
        for (int r = 0; r < size; r++) {
            const float *t = row_of(table, row, first + r, n);
            float *to = zs + (long)r * n;
            if (!other) {
                memcpy(to, t, n * sizeof *to);
                continue;
            }
            const float *s = row_of(other, other_row, first + r, n);
            for (int j = 0; j < n; j++) to[j] = t[j] + s[j];
        }
        multiply_apart(0, 1, size, n, k, x + (long)first * k, k, w, w_row, 1, zs, n);
        for (int r = 0; r < size; r++) {
            activate(kind, width, zs + (long)r * n);
            memcpy(us + (long)r * width, b, width * sizeof *us);
            memcpy(ys + (long)r * out, zs + (long)r * n + width, out * sizeof *ys);
        }
        multiply_apart(0, 1, size, width, width, zs, n, a, width, 1, us, width);
        for (int r = 0; r < size; r++) activate(kind, width, us + (long)r * width);
        multiply(0, 1, size, out, width, us, f, 1, ys);
    }
    return 1;
}

enum { CHUNKS = 48 }; /* that stay in a cache between steps */

/* The network above with packed S, W, A and F: z = t + s S' + x W', with t, of the time, and s S' of the condition. */
typedef struct {
    int width, kind, conds, is_shared; /* is_shared: one condition for all */
    const float *s, *cond_w, *w, *a, *b, *f;
} packed_t;

/* Write s S' of rows from `start` on, or the one of all. */
static void project(const packed_t *net, int start, int rows, int n, float *offset) {
    const int row = net->width + n, given = net->is_shared ? 1 : rows;
    memset(offset, 0, (long)given * row * sizeof *offset);
    add_packed(given, row, net->conds, net->s + (net->is_shared ? 0 : (long)start * net->conds), net->conds, net->cond_w,
               offset, row);
}

/* y is z[H:] of z (R, H + n) afterwards; u (R, H). */
static void evaluate(const packed_t *net, int rows, int n, const float *t, const float *offset, const float *x, float *z,
                     float *u) {
    const int width = net->width, row = width + n;
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < row; j++) z[(long)r * row + j] = t[j] + offset[(net->is_shared ? 0 : (long)r * row) + j];
    add_packed(rows, row, n, x, n, net->w, z, row);
    for (int r = 0; r < rows; r++) {
        activate(net->kind, width, z + (long)r * row);
        memcpy(u + (long)r * width, net->b, width * sizeof *u);
    }
    add_packed(rows, width, width, z, row, net->a, u, width);
    for (int r = 0; r < rows; r++) activate(net->kind, width, u + (long)r * width);
    add_packed(rows, n, width, u, width, net->f, z + width, row);
}

/* Rows that are evaluated together, and numbers that `work` has to hold for them. */
static int together(int rows) { return rows < CHUNKS ? rows : CHUNKS; }
int work_of(int rows, int width, int n) { return together(rows) * (3 * width + 2 * n); }

/* Write y (R, n) for x (R, n) at one time. */
void packed_field(const packed_t *net, int rows, int n, const float *t, const float *x, float *y, float *work) {
    const int row = net->width + n;
    float *offset = work, *z = work + together(rows) * row, *u = z + together(rows) * row;
    for (int start = 0; start < rows; start += CHUNKS) {
        const int size = together(rows - start);
        project(net, start, size, n, offset);
        evaluate(net, size, n, t, offset, x + (long)start * n, z, u);
        for (int r = 0; r < size; r++) memcpy(y + (long)(start + r) * n, z + (long)r * row + net->width, n * sizeof *y);
    }
}

static inline float bounded(float x, float limit) { return x > limit ? limit : x < -limit ? -limit : x; } /* NaN stays */

/* A step of a sampler: six numbers. */
typedef struct {
    float ratio, limit, of_x, of_bounded, of_y, std;
} step_t;

/* What the steps of a sampler share. Draws of the first step are at `noise`, those of a row noise_row after those of the
   row before; null: none. States before the steps from `record_from` on, and the result, and means after them are kept
   where not null. */
typedef struct {
    int steps, record_from, is_ready;
    float state_limit, noise_limit;
    long noise_row;
    const step_t *step;
    const float *noise;
    float *states, *means;
} chain_t;

/* With p = y, or x + ratio y unless it `is_ready`: x <- of_x x + of_bounded bounded(p) + of_y y + std bounded(draw),
   bounded. */
static void take_step(const chain_t *chain, long r, int k, int n, const float *y, float *x) {
    const step_t *c = chain->step + k;
    const float *draw = chain->noise + r * chain->noise_row + (long)k * n;
    const long kept = chain->steps - chain->record_from, place = k - chain->record_from;
    const int is_kept = chain->states && place >= 0;
    if (is_kept) memcpy(chain->states + (r * (kept + 1) + place) * n, x, n * sizeof *x);
    for (int i = 0; i < n; i++) {
        const float p = chain->is_ready ? y[i] : x[i] + c->ratio * y[i];
        x[i] *= c->of_x;
        if (c->of_bounded != 0) x[i] += c->of_bounded * bounded(p, c->limit);
        if (c->of_y != 0) x[i] += c->of_y * y[i];
    }
    if (is_kept) memcpy(chain->means + (r * kept + place) * n, x, n * sizeof *x);
    for (int i = 0; i < n; i++)
        x[i] = bounded(c->std > 0 ? x[i] + c->std * bounded(draw[i], chain->noise_limit) : x[i], chain->state_limit);
}

/* Steps first to last of chunks x (R, n). The network's times of these steps begin at `table`; without a network,
   `given` are its outputs (R, n) for the one step. */
void take_steps(const chain_t *chain, const packed_t *net, int rows, int first, int last, int n, const float *table,
                const float *given, float *x, float *work) {
    if (!net) {
        for (long r = 0; r < rows; r++) take_step(chain, r, first, n, given + r * n, x + r * n);
        return;
    }
    const int row = net->width + n;
    float *offset = work, *z = work + together(rows) * row, *u = z + together(rows) * row;
    for (int start = 0; start < rows; start += CHUNKS) {
        const int size = together(rows - start);
        float *xs = x + (long)start * n;
        project(net, start, size, n, offset);
        for (int k = first; k < last; k++) {
            evaluate(net, size, n, table + (long)(k - first) * row, offset, xs, z, u);
            for (int r = 0; r < size; r++)
                take_step(chain, start + r, k, n, z + (long)r * row + net->width, xs + (long)r * n);
        }
    }
}

/* Gradients as x, W without gaps, the tables, A, b and F; x_grad, w_grad, other_grad, and all from table_grad on, may be
   null; sums begin with what is there. work holds BLOCK rows of 2 H + out. */
void residual_backward(int rows, int k, int width, int out, int kind, int w_row, const float *x, const float *w,
                       const int64_t *row, const int64_t *other_row, const float *a, const float *f, const float *z,
                       const float *u, const float *grad, float *work, float *x_grad, float *w_grad, float *table_grad,
                       float *other_grad, float *a_grad, float *b_grad, float *f_grad) {
    const int n = width + out;
    float *du = work, *dz = work + (long)BLOCK * width;
    for (int first = 0; first < rows; first += BLOCK) {
        const int size = rows - first < BLOCK ? rows - first : BLOCK;
        const float *zs = z + (long)first * n, *us = u + (long)first * width, *g = grad + (long)first * out;
        multiply(0, 0, size, width, out, g, f, 0, du);
        for (int r = 0; r < size; r++) {
            float *d = du + (long)r * width;
            through_activation(kind, width, us + (long)r * width, d);
            if (!f_grad) continue;
            for (int j = 0; j < width; j++) b_grad[j] += d[j];
        }
        if (f_grad) {
            multiply(1, 0, out, width, size, g, us, 1, f_grad);
            multiply_apart(1, 0, width, width, size, du, width, zs, n, 1, a_grad, width);
        }
        multiply_apart(0, 0, size, width, width, du, width, a, width, 0, dz, n);
        for (int r = 0; r < size; r++) {
            float *d = dz + (long)r * n;
            through_activation(kind, width, zs + (long)r * n, d);
            memcpy(d + width, g + (long)r * out, out * sizeof *d);
            if (!table_grad) continue;
            float *t = (float *)row_of(table_grad, row, first + r, n);
            for (int j = 0; j < n; j++) t[j] += d[j];
            if (!other_grad) continue;
            float *s = (float *)row_of(other_grad, other_row, first + r, n);
            for (int j = 0; j < n; j++) s[j] += d[j];
        }
        if (w_grad) multiply_apart(1, 0, n, k, size, dz, n, x + (long)first * k, k, 1, w_grad, k);
        if (x_grad) multiply_apart(0, 0, size, k, n, dz, n, w, w_row, 0, x_grad + (long)first * k, k);
    }
}

/* Mish of group normalisation: x, y (B, T, C), G groups of C / G channels; mean and inverse deviation (B, C), the same
   within a group. */

static void over_groups(int channels, int groups, int rows, float *sum) {
    const int size = channels / groups;
    for (int g = 0; g < groups; g++) {
        float total = 0;
#pragma omp simd reduction(+ : total)
        for (int j = 0; j < size; j++) total += sum[g * size + j];
        total /= (float)rows * size;
        for (int j = 0; j < size; j++) sum[g * size + j] = total;
    }
}

void norm_mish_forward(int batch, int rows, int channels, int groups, float eps, const float *x, const float *weight,
                       const float *bias, float *y, float *mean, float *inverse) {
    const long size = (long)rows * channels;
    for (int b = 0; b < batch; b++, x += size, y += size, mean += channels, inverse += channels) {
        memset(mean, 0, channels * sizeof *mean);
        memset(inverse, 0, channels * sizeof *inverse);
        for (int t = 0; t < rows; t++)
            for (int c = 0; c < channels; c++) mean[c] += x[t * channels + c];
        over_groups(channels, groups, rows, mean);
        for (int t = 0; t < rows; t++)
            for (int c = 0; c < channels; c++) {
                const float d = x[t * channels + c] - mean[c];
                inverse[c] += d * d;
            }
        over_groups(channels, groups, rows, inverse);
        for (int c = 0; c < channels; c++) inverse[c] = inverse_of(inverse[c], eps);
        for (int t = 0; t < rows; t++)
            for (int c = 0; c < channels; c++) {
                const long i = t * channels + c;
                y[i] = mish_of((x[i] - mean[c]) * inverse[c] * weight[c] + bias[c]);
            }
    }
}

/* weight_grad and bias_grad (C), x_grad (B, T, C); work holds 2 C numbers. */
void norm_mish_backward(int batch, int rows, int channels, int groups, const float *restrict x, const float *restrict weight,
                        const float *restrict bias, const float *restrict mean, const float *restrict inverse, const float *restrict grad, float *restrict x_grad,
                        float *restrict weight_grad, float *restrict bias_grad, float *restrict work) {
    const long size = (long)rows * channels;
    float *sum = work, *along = work + channels;
    memset(weight_grad, 0, channels * sizeof *weight_grad);
    memset(bias_grad, 0, channels * sizeof *bias_grad);
    for (int b = 0; b < batch; b++) {
        memset(sum, 0, channels * sizeof *sum);
        memset(along, 0, channels * sizeof *along);
        for (int t = 0; t < rows; t++)
            for (int c = 0; c < channels; c++) {
                const long i = t * channels + c;
                const float unit = (x[i] - mean[c]) * inverse[c];
                const float slope = grad[i] * mish_slope(unit * weight[c] + bias[c]);
                x_grad[i] = slope;
                sum[c] += slope;
                along[c] += slope * unit;
            }
        for (int c = 0; c < channels; c++) {
            bias_grad[c] += sum[c], weight_grad[c] += along[c];
            sum[c] *= weight[c], along[c] *= weight[c];
        }
        over_groups(channels, groups, rows, sum);
        over_groups(channels, groups, rows, along);
        for (int t = 0; t < rows; t++)
            for (int c = 0; c < channels; c++) {
                const long i = t * channels + c;
                const float unit = (x[i] - mean[c]) * inverse[c];
                x_grad[i] = inverse[c] * (x_grad[i] * weight[c] - sum[c] - along[c] * unit);
            }
        x += size, grad += size, x_grad += size, mean += channels, inverse += channels;
    }
}

#ifdef __AVX512F__

/* Products of few rows with matrices that are larger than the caches: dot products along the rows of the matrix, of
   which each is read once and ahead. Of 32 registers 16 hold sums. */

enum { COLUMNS = 4, ROWS = 4, AHEAD = 256, FEW = 16, LARGE = 1 << 18 };

INLINE void dots(int rows, int columns, int y_row, int k, const float *x,
                                                       const float *w, const float *bias, float *y) {
    lanes_t sums[ROWS][COLUMNS];
    memset(sums, 0, sizeof sums);
    const int whole = k - k % LANES;
    for (int i = 0; i < whole; i += LANES) {
        lanes_t part[COLUMNS];
        for (int c = 0; c < columns; c++) {
            const float *from = w + (long)c * k + i;
            part[c] = *(const lanes_t *)from;
            __builtin_prefetch(from + AHEAD);
        }
        for (int r = 0; r < rows; r++) {
            const lanes_t row = *(const lanes_t *)(x + (long)r * k + i);
            for (int c = 0; c < columns; c++) sums[r][c] += part[c] * row;
        }
    }
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < columns; c++) {
            float sum = 0;
            for (int i = 0; i < LANES; i++) sum += sums[r][c][i];
            for (int i = whole; i < k; i++) sum += x[(long)r * k + i] * w[(long)c * k + i];
            y[(long)r * y_row + c] = sum + bias[c];
        }
}

/* y (R, N) = x (R, K) w^T + bias, with w (N, K) and bias (N). */
static void few_rows(int rows, int n, int k, const float *x, const float *w, const float *bias, float *y) {
    for (int c = 0; c < n; c += COLUMNS)
        for (int r = 0; r < rows; r += ROWS) {
            const float *from = x + (long)r * k, *along = w + (long)c * k, *added = bias + c;
            float *to = y + (long)r * n + c;
            const int left = rows - r < ROWS ? rows - r : ROWS;
            if (n - c < COLUMNS)
                for (int i = 0; i < left * (n - c); i++) {
                    const int row = i / (n - c), column = i % (n - c);
                    dots(1, 1, n, k, from + (long)row * k, along + (long)column * k, added + column,
                         to + (long)row * n + column);
                }
            else if (left == 4)
                dots(4, COLUMNS, n, k, from, along, added, to);
            else if (left == 3)
                dots(3, COLUMNS, n, k, from, along, added, to);
            else if (left == 2)
                dots(2, COLUMNS, n, k, from, along, added, to);
            else
                dots(1, COLUMNS, n, k, from, along, added, to);
        }
}

#endif

/* Convolutions along rows: row t of the output is a product of weights (N, C, K) with the K rows of x (T, C) from
   t * stride - before on, as far as there are any.

   Of a large batch, rows of one t follow each other in a copy, and weights are copied to (N, K, C): then a tap k of the
   kernel is one product of weights (N, C) with the rows of all t that meet no padding. Of a small batch the rows are
   copied to windows (C, K). */

enum { MANY = 48 };

static int takes_windows(int batch, int rows, int size, int stride) {
    return size == 1 || batch < MANY || rows % stride;
}

INLINE void exchange(int back, int size, int channels, const float *restrict from,
                                                           float *restrict to) {
    if (back)
        for (int c = 0; c < channels; c++)
            for (int j = 0; j < size; j++) to[c * size + j] = from[j * channels + c];
    else
        for (int j = 0; j < size; j++)
            for (int c = 0; c < channels; c++) to[j * channels + c] = from[c * size + j];
}

/* Weights (N, C, K) to (N, K, C), or if `back` the other way. */
static void turn(int back, int fan_out, int channels, int size, const float *from, float *to) {
    const long step = (long)channels * size;
    for (int n = 0; n < fan_out; n++, from += step, to += step)
        if (size == 5 && back)
            exchange(1, 5, channels, from, to);
        else if (size == 5)
            exchange(0, 5, channels, from, to);
        else if (size == 3 && back)
            exchange(1, 3, channels, from, to);
        else if (size == 3)
            exchange(0, 3, channels, from, to);
        else
            exchange(back, size, channels, from, to);
}

/* The rows of x that output row t reads: from `from`, at `low` to `high` of a kernel. */
typedef struct { int from, low, high; } reach_t;

static reach_t reach_of(int t, int rows, int before, int size, int stride) {
    const int from = t * stride - before;
    return (reach_t){from, from < 0 ? -from : 0, from + size > rows ? rows - from : size};
}

static void make_windows(int batch, int rows, int channels, int before, int size, int stride, int windows,
                         const float *x, float *work) {
    memset(work, 0, (long)batch * windows * size * channels * sizeof *work);
    for (int b = 0; b < batch; b++, x += (long)rows * channels)
        for (int t = 0; t < windows; t++, work += size * channels) {
            const reach_t reach = reach_of(t, rows, before, size, stride);
            if (!reach.low && reach.high == size)
                turn(1, 1, channels, size, x + reach.from * channels, work);
            else
                for (int j = reach.low; j < reach.high; j++)
                    for (int c = 0; c < channels; c++) work[c * size + j] = x[(reach.from + j) * channels + c];
        }
}

static void add_windows(int batch, int rows, int channels, int before, int size, int stride, int windows,
                        const float *work, float *x) {
    memset(x, 0, (long)batch * rows * channels * sizeof *x);
    for (int b = 0; b < batch; b++, x += (long)rows * channels)
        for (int t = 0; t < windows; t++, work += size * channels) {
            const reach_t reach = reach_of(t, rows, before, size, stride);
            for (int j = reach.low; j < reach.high; j++)
                for (int c = 0; c < channels; c++) x[(reach.from + j) * channels + c] += work[c * size + j];
        }
}

/* Rows (B, T, C) to (T, B, C), or if `back` the other way; of rows that `stride` divides, those of equal remainder follow
   each other. */
static void regroup(int back, int batch, int rows, int channels, int stride, const float *from, float *to) {
    for (int t = 0; t < rows; t++) {
        const long place = (t % stride) * (rows / stride) + t / stride;
        for (int b = 0; b < batch; b++) {
            const long one = ((long)b * rows + t) * channels, other = (place * batch + b) * channels;
            memcpy(to + (back ? one : other), from + (back ? other : one), channels * sizeof *to);
        }
    }
}

/* The output rows that meet tap j of a kernel: `count` from `first` on, and the place of the row that the first reads. */
typedef struct { int first, count, place; } tap_t;

static tap_t tap_of(int j, int rows, int before, int stride, int windows) {
    int first = 0, last = windows;
    while (first < windows && first * stride + j < before) first++;
    while (last > first && (last - 1) * stride + j - before >= rows) last--;
    const int row = first * stride + j - before;
    return (tap_t){first, last - first, row % stride * (rows / stride) + row / stride};
}

/* y (B, windows, N) of x (B, T, C); work holds all windows, or the weights, x and y. */
void conv_forward(int batch, int rows, int channels, int before, int size, int stride, int windows, int fan_out,
                  const float *x, const float *weight, const float *bias, float *work, float *y) {
    const int all = batch * windows, width = size * channels;
    if (takes_windows(batch, rows, size, stride)) {
        if (size > 1) make_windows(batch, rows, channels, before, size, stride, windows, x, work);
        const float *in = size > 1 ? work : x;
#ifdef __AVX512F__
        if (all <= FEW && (long)fan_out * width >= LARGE) {
            few_rows(all, fan_out, width, in, weight, bias, y);
            return;
        }
#endif
        multiply(0, 1, all, fan_out, width, in, weight, 0, y);
        for (int i = 0; i < all; i++)
            for (int j = 0; j < fan_out; j++) y[(long)i * fan_out + j] += bias[j];
        return;
    }
    float *turned = work, *xs = turned + (long)fan_out * width, *ys = xs + (long)batch * rows * channels;
    turn(0, fan_out, channels, size, weight, turned);
    regroup(0, batch, rows, channels, stride, x, xs);
    for (int i = 0; i < all; i++) memcpy(ys + (long)i * fan_out, bias, fan_out * sizeof *ys);
    for (int j = 0; j < size; j++) {
        const tap_t tap = tap_of(j, rows, before, stride, windows);
        if (tap.count > 0)
            multiply_apart(0, 1, tap.count * batch, fan_out, channels, xs + (long)tap.place * batch * channels, channels,
                           turned + (long)j * channels, width, 1, ys + (long)tap.first * batch * fan_out, fan_out);
    }
    regroup(1, batch, windows, fan_out, 1, ys, y);
}

/* Gradients as x, weight and bias, the first two or null; grad (B, windows, N); work holds all windows of a batch below
   MANY, or the weights twice, x twice and grad. */
void conv_backward(int batch, int rows, int channels, int before, int size, int stride, int windows, int fan_out,
                   const float *x, const float *weight, const float *grad, float *work, float *x_grad,
                   float *weight_grad, float *bias_grad) {
    const int all = batch * windows, width = size * channels;
    memset(bias_grad, 0, fan_out * sizeof *bias_grad);
    for (int i = 0; i < all; i++)
        for (int j = 0; j < fan_out; j++) bias_grad[j] += grad[(long)i * fan_out + j];
    if (takes_windows(batch, rows, size, stride)) {
        if (weight_grad) {
            if (size > 1) make_windows(batch, rows, channels, before, size, stride, windows, x, work);
            multiply(1, 0, fan_out, width, all, grad, size > 1 ? work : x, 0, weight_grad);
        }
        if (!x_grad) return;
        multiply(0, 0, all, width, fan_out, grad, weight, 0, size > 1 ? work : x_grad);
        if (size > 1) add_windows(batch, rows, channels, before, size, stride, windows, work, x_grad);
        return;
    }
    const long weights = (long)fan_out * width, inputs = (long)batch * rows * channels;
    float *turned = work, *sum = turned + weights, *xs = sum + weights, *of_xs = xs + inputs, *gs = of_xs + inputs;
    regroup(0, batch, windows, fan_out, 1, grad, gs);
    if (x_grad) {
        turn(0, fan_out, channels, size, weight, turned);
        memset(of_xs, 0, inputs * sizeof *of_xs);
    }
    if (weight_grad) regroup(0, batch, rows, channels, stride, x, xs);
    for (int j = 0; j < size; j++) {
        const tap_t tap = tap_of(j, rows, before, stride, windows);
        const float *g = gs + (long)tap.first * batch * fan_out;
        const long at = (long)tap.place * batch * channels, skipped = (long)j * channels;
        const int met = tap.count * batch;
        if (x_grad && met)
            multiply_apart(0, 0, met, channels, fan_out, g, fan_out, turned + skipped, width, 1, of_xs + at, channels);
        if (weight_grad && met)
            multiply_apart(1, 0, fan_out, channels, met, g, fan_out, xs + at, channels, 0, sum + skipped, width);
        else if (weight_grad)
            for (int n = 0; n < fan_out; n++) memset(sum + skipped + (long)n * width, 0, channels * sizeof *sum);
    }
    if (x_grad) regroup(1, batch, rows, channels, stride, of_xs, x_grad);
    if (weight_grad) turn(1, fan_out, channels, size, sum, weight_grad);
}
