# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
# cython: initializedcheck=False, embedsignature=False, auto_pickle=False
"""The compiled core: gather rows, add them, normalise them, round them once.

What is kept between calls (LayerNorm's weight and bias, the scales of quantized tables) is held
in typed memoryviews. Table rows are read through a pointer and a row stride instead: rows may be
float16, bfloat16 or misaligned, for which no typed memoryview exists. Ids are read a chunk at a
time into a local buffer, and the value that was checked is the value that is used; so an array
that another thread rewrites meanwhile can spoil the values of a call, but never its memory.

Python decides: arguments come in here checked for type (`_arrays`). Python explains too: what is
found wrong here is put into words there.
"""

cimport numpy as cnp
from cpython.long cimport PyLong_CheckExact
from cpython.pycapsule cimport PyCapsule_New
from cpython.ref cimport Py_INCREF
from cython.parallel cimport prange
from libc.stdint cimport int32_t, int64_t
from libc.stdlib cimport free, getenv, malloc
from libc.string cimport strcmp, strcpy

import numpy as np

from bertinput import _threads

cnp.import_array()


cdef extern from "numpy/arrayobject.h":
    object PyArray_Empty(int dims, const cnp.npy_intp *shape, cnp.dtype dtype, int fortran)
    ctypedef struct PyDataMemAllocator:
        void *ctx
        void *(*malloc)(void *, size_t) noexcept nogil
        void *(*calloc)(void *, size_t, size_t) noexcept nogil
        void *(*realloc)(void *, void *, size_t) noexcept nogil
        void (*free)(void *, void *, size_t) noexcept nogil
    ctypedef struct PyDataMem_Handler:
        char name[127]
        unsigned char version
        PyDataMemAllocator allocator
    object PyDataMem_SetHandler(object handler)

cdef extern from "_pool.h" nogil:
    void *bi_pool_malloc(void *, size_t)
    void *bi_pool_calloc(void *, size_t, size_t)
    void *bi_pool_realloc(void *, void *, size_t)
    void bi_pool_free(void *, void *, size_t)
    size_t bi_pool_limit()
    size_t bi_pool_held()
    void bi_pool_set_limit(size_t limit)
    size_t bi_pool_trim()

cdef extern from "_rows.h" nogil:
    enum:
        BI_F64
        BI_F32
        BI_F16
        BI_BF16
        BI_I8
        BI_U8
        BI_TABLE_TYPES
        BI_RESULT_TYPES
        BI_MAX_TERMS
        BI_ISAS
        BI_NORM_ROWS
    ctypedef struct bi_row:
        const char *at
        float scale
        int32_t zero
    ctypedef struct bi_moments:
        pass
    ctypedef struct bi_norm_vectors:
        const void *weight
        const void *bias
        double eps
    ctypedef void (*bi_fold)(void *, const bi_row *, int64_t, bi_moments *, int) noexcept nogil
    ctypedef void (*bi_norm)(
        const char *, int64_t, const bi_moments *, int64_t, int64_t, const bi_norm_vectors *,
        char *, int64_t, int) noexcept nogil
    ctypedef void (*bi_round)(const void *, void *, int64_t) noexcept nogil
    ctypedef struct bi_kernels:
        bi_fold fold[3][6]
        bi_fold add[6]
        bi_norm norm
        bi_round round[4]
    void bi_prefetch(const char *at, int64_t bytes)
    bint BI_STREAMS
    void bi_stream_end()
    const char *bi_isa_names[3]
    bint bi_isa_built(int isa)
    bint bi_isa_runs_here(int isa)
    const bi_kernels *bi_kernels_for(int isa, bint wide)

cdef extern from "_ids.h" nogil:
    enum:
        BI_MAX_DIMS
    ctypedef struct bi_ids:
        const char *data
        int dims
        int itemsize
        int is_signed
        int swapped
        int64_t shape[64]
        int64_t stride[64]
    void bi_read_ids(
        const bi_ids *source, const char *at, int64_t stride, int64_t count, int64_t *ids)
    int64_t bi_first_outside(const int64_t *ids, int64_t count, int64_t rows)

cdef extern from "_threads.h" nogil:
    int BI_OPENMP
    bint bi_forked
    int bi_watch_forks()
    int omp_get_max_threads()
    int bi_team_can_start(int threads)
    ctypedef struct bi_float_state:
        pass
    void bi_get_float_state(bi_float_state *state)
    void bi_set_float_state(const bi_float_state *state)

cdef extern from *:
    """
    #if defined(__clang__)
    #define BI_COMPILER "Clang " __clang_version__
    #elif defined(__GNUC__)
    #define BI_COMPILER "GCC " __VERSION__
    #elif defined(_MSC_VER)
    #define BI_TEXT_(x) #x
    #define BI_TEXT(x) BI_TEXT_(x)
    #define BI_COMPILER "MSVC " BI_TEXT(_MSC_VER)
    #else
    #define BI_COMPILER "unknown"
    #endif
    """
    const char *BI_COMPILER
    const unsigned int CYTHON_HEX_VERSION


# Which ids index a table.
cdef enum:
    TOKEN
    POSITION
    SEGMENT
    ROLES

ROLE_NAMES = ("token", "position", "segment")
TYPE_NAMES = ("float64", "float32", "float16", "bfloat16", "int8", "uint8")

# Tokens whose ids are decoded and checked at a time: three buffers of int64 stay far below L1.
# No more shares than MAX_PARTS: their states lie on the stack.
cdef enum:
    CHUNK = 128
    MAX_PARTS = 64
# The token table's row so many tokens ahead is prefetched, so many bytes of it. Measured on Zen 3,
# float32, against no prefetch, width 768 (384). Ids that change from call to call: 128 tokens 0.84
# (0.61), 512 0.91, 1024 0.85, 4096 0.86 times; the same ids, whose rows a cache holds: 1.01 (0.94),
# 0.93, 1.01, 0.87. Whole rows cost the latter a tenth; 1, 3 and 4 ahead were close.
cdef enum:
    AHEAD = 2
    AHEAD_BYTES = 1024
# Results of so many bytes are written past the caches, which they would only clear of tables.
# Measured on Zen 3 with 32 MiB of last-level cache, float32, width 768, the sum and then a pass
# that reads it, against ordinary stores: 3 MiB 1.22, 6 MiB 1.16, 12 MiB 0.93, 18 MiB 0.91, 48 MiB
# 0.85 times. On Zen 5 results of 64 MiB and more took 0.96 to 1.07 times as long.
cdef enum:
    STREAM_BYTES = 12582912

# Work space of so many bytes lies on the caller's stack: malloc and free took 0.1 us for 12 KiB.
cdef enum:
    STACK_BYTES = 16384

# Results of so many bytes take their memory from the pool. Measured on Zen 3 with glibc, a new
# result against out=, with / without the pool: 64 MiB 1.00 / 2.07, 12 MiB 0.93 / 1.02, 3 MiB
# 0.98 / 0.96, 384 KiB 1.11 / 1.01: small ones are served as well by the heap, without a change of
# NumPy's allocator.
cdef enum:
    POOL_LEAST = 1048576

# Below this many elements of result a call keeps the GIL: releasing it costs about 50 ns when
# nobody waits, and a wait for it when somebody does, against at most about 10 us of work.
cdef enum:
    GIL_ELEMENTS = 32768
# The least work for which a second thread pays, and the least share of each. Measured with sleeping
# (passive) idle threads on a 2-core Zen 5 virtual machine, float32, width 768, one thread against
# two: 512 tokens 57 us / 120 us, 1024 130 / 159, 2048 319 / 246, 4096 877 / 540; with LayerNorm
# 1024 tokens 226 / 215. Waking a thread costs about 70 us. To repeat it, build with both at 1.
cdef enum:
    TEAM_ELEMENTS = 1048576
    SHARE_ELEMENTS = 524288


cdef class Table:
    """One table: where its rows lie and how they are decoded.

    `values` is an array of shape (rows, width) of the type that `type`, a place in TYPE_NAMES,
    says (bfloat16 may come as uint16). Contiguous rows of this machine's byte order are read
    where they lie, whatever their stride and alignment; other layouts are copied, once.
    `given` is the caller's own array, from which `values` may be a copy.
    """

    cdef readonly cnp.ndarray values
    cdef readonly cnp.ndarray given
    cdef readonly int type
    cdef const char *data
    cdef int64_t rows, width, stride
    cdef const float[::1] scale
    cdef const int32_t[::1] zero_point

    def __init__(self, cnp.ndarray values not None, int type, cnp.ndarray given not None,
                 const float[::1] scale=None, const int32_t[::1] zero_point=None):
        self.fill(values, type, given, scale, zero_point)

    cdef fill(self, cnp.ndarray values, int type, cnp.ndarray given, const float[::1] scale,
              const int32_t[::1] zero_point):
        self.type = type
        self.scale = scale
        self.zero_point = zero_point
        self.width = -1  # not a table, which only Stage can say in full
        if cnp.PyArray_NDIM(values) == 2:
            if cnp.PyArray_ISBYTESWAPPED(values) or (
                    cnp.PyArray_DIM(values, 1) > 1
                    and cnp.PyArray_STRIDE(values, 1) != cnp.PyArray_ITEMSIZE(values)):
                values = explain().readable(values)
            self.data = <const char *> cnp.PyArray_DATA(values)
            self.rows = cnp.PyArray_DIM(values, 0)
            self.width = cnp.PyArray_DIM(values, 1)
            self.stride = cnp.PyArray_STRIDE(values, 0)
        self.values = values
        self.given = given


cdef class Norm:
    """LayerNorm's weight, bias (perhaps None) and eps.

    `vectors64` and `vectors32` hold weight and bias as two rows, in both types of computation; in
    place of no bias stand negative zeros, which change no number that they are added to.
    """

    cdef readonly cnp.ndarray weight
    cdef readonly cnp.ndarray bias
    cdef readonly double eps
    cdef const double[:, ::1] vectors64
    cdef const float[:, ::1] vectors32

    def __cinit__(self, cnp.ndarray weight not None, cnp.ndarray bias,
                  const double[:, ::1] vectors64 not None, const float[:, ::1] vectors32 not None,
                  double eps):
        self.weight = weight
        self.bias = bias
        self.vectors64 = vectors64
        self.vectors32 = vectors32
        self.eps = eps


# One call, ready to run: nothing in it needs Python.
cdef struct Term:
    const char *data
    int64_t rows
    int64_t stride
    const float *scale
    int64_t scale_step
    const int32_t *zero
    int64_t zero_step
    int role
    bi_fold fold            # sets (first term) or adds (the others), where the table types differ

cdef struct Job:
    Term term[3]
    int terms
    bi_fold fold            # the whole sum at once, where the table types are one
    bi_norm norm            # NULL: no LayerNorm
    bi_norm_vectors vectors
    bi_round round          # NULL: the result is of the computation's type
    int64_t width
    int64_t row_bytes       # of a row of the computation's type, padded to 64
    int64_t out_bytes       # of a row of the result
    int64_t ahead_bytes     # of a row of the first table, to be prefetched
    bint stream             # what is written last goes past the caches
    char *out
    char *scratch           # for each share BI_NORM_ROWS rows before LayerNorm, and as many after
    int64_t scratch_bytes
    # Ids: NULL stands for 0 (segments) or the place in the last axis (positions).
    const bi_ids *ids[3]
    int64_t limit[3]
    # Tokens: leading axes, merged where all ids allow it, and the last one.
    int64_t tokens
    int leads
    int64_t lead_shape[64]
    int64_t lead_stride[3][64]
    int64_t last
    int64_t last_stride[3]
    bint counted            # positions count along the last axis


cdef inline int64_t smaller(int64_t a, int64_t b) noexcept nogil:
    return a if a < b else b


cdef inline void find_ids(const Job *job, int64_t lead, const char **at) noexcept nogil:
    """Where the ids of one run of the last axis begin; `lead` counts runs in C order."""
    cdef int64_t rest, index
    cdef int role, axis
    for role in range(ROLES):
        at[role] = job.ids[role].data if job.ids[role] != NULL else NULL
    for axis in range(job.leads - 1, -1, -1):
        rest = lead // job.lead_shape[axis]
        index = lead - rest * job.lead_shape[axis]
        for role in range(ROLES):
            if job.ids[role] != NULL:
                at[role] += index * job.lead_stride[role][axis]
        lead = rest


cdef inline int read_ids(const Job *job, const char *const *at, int64_t place, int64_t count,
                         int64_t (*ids)[CHUNK]) noexcept nogil:
    """Read and check `count` ids of each role; 0, or 1 + the role whose id went out of range."""
    cdef int64_t i
    cdef int role
    for role in range(ROLES):
        if job.ids[role] != NULL:
            bi_read_ids(job.ids[role], at[role] + place * job.last_stride[role],
                        job.last_stride[role], count, ids[role])
            if bi_first_outside(ids[role], count, job.limit[role]) >= 0:
                return 1 + role
        else:
            for i in range(count):
                ids[role][i] = place + i if role == POSITION and job.counted else 0
    return 0


cdef inline void sum_row(const Job *job, int64_t (*ids)[CHUNK], int64_t i, char *acc,
                         bi_moments *moments) noexcept nogil:
    """Sum the rows of the chunk's i-th token."""
    cdef bi_row row[3]
    cdef const Term *term
    cdef int64_t id
    cdef int k
    for k in range(job.terms):
        term = &job.term[k]
        id = ids[term.role][i]
        row[k].at = term.data + id * term.stride
        if term.scale != NULL:
            row[k].scale = term.scale[id * term.scale_step]
            row[k].zero = term.zero[id * term.zero_step] if term.zero != NULL else 0
    if job.fold != NULL:
        job.fold(acc, row, job.width, moments, job.stream and moments == NULL)
    else:
        for k in range(job.terms):
            job.term[k].fold(acc, row + k, job.width, moments if k == job.terms - 1 else NULL, 0)


cdef void compute_rows(const Job *job, int64_t (*ids)[CHUNK], int64_t count, char *out,
                       char *scratch) noexcept nogil:
    """Sum, normalise and round the rows of a chunk of tokens."""
    cdef bi_moments moments[BI_NORM_ROWS]
    cdef const Term *first = &job.term[0]
    cdef int64_t i, k, rows
    cdef char *normed = out
    cdef int64_t normed_bytes = job.out_bytes
    if job.round != NULL:
        normed = scratch + job.scratch_bytes // 2 if job.norm != NULL else scratch
        normed_bytes = job.row_bytes
    i = 0
    while i < count:
        rows = smaller(BI_NORM_ROWS, count - i)
        for k in range(i, i + rows):
            if k + AHEAD < count:
                bi_prefetch(first.data + ids[first.role][k + AHEAD] * first.stride,
                            job.ahead_bytes)
            if job.norm != NULL:
                sum_row(job, ids, k, scratch + (k - i) * job.row_bytes, &moments[k - i])
            else:
                sum_row(job, ids, k, normed + (k - i) * normed_bytes, NULL)
        if job.norm != NULL:
            job.norm(scratch, job.row_bytes, moments, rows, job.width, &job.vectors, normed,
                     normed_bytes, job.stream)
        if job.round != NULL:
            for k in range(rows):
                job.round(normed + k * normed_bytes, out + k * job.out_bytes, job.width)
        else:
            normed += rows * normed_bytes
        out += rows * job.out_bytes
        i += rows


cdef int run_range(const Job *job, int64_t start, int64_t stop, char *scratch) noexcept nogil:
    """Compute tokens start..stop-1 (in C order); 0, or 1 + the role whose id went out of range."""
    cdef int64_t ids[3][CHUNK]
    cdef const char *at[3]
    cdef char *out = job.out + start * job.out_bytes
    cdef int64_t place, count
    cdef int failed
    while start < stop:
        find_ids(job, start // job.last, at)
        place = start % job.last
        while place < job.last and start < stop:
            count = smaller(CHUNK, smaller(job.last - place, stop - start))
            failed = read_ids(job, at, place, count, ids)
            if failed:
                return failed
            compute_rows(job, ids, count, out, scratch)
            out += count * job.out_bytes
            place += count
            start += count
    if job.stream:
        bi_stream_end()
    return 0


cdef int run_part(const Job *job, int part, int parts,
                  const bi_float_state *state) noexcept nogil:
    """Compute one of `parts` shares of the tokens, with the caller's rounding and flushing."""
    cdef int64_t share = job.tokens // parts
    cdef int64_t spare = job.tokens % parts
    if state != NULL:
        bi_set_float_state(state)
    return run_range(job, share * part + smaller(part, spare),
                     share * (part + 1) + smaller(part + 1, spare),
                     job.scratch + part * job.scratch_bytes)


cdef int run_parts(const Job *job, int parts, int threads) noexcept nogil:
    """Compute all shares on at most `threads` threads; one thread enters no parallel region."""
    cdef int failed[MAX_PARTS]
    cdef int part
    cdef bi_float_state state
    if threads == 1 or not bi_team_can_start(threads):
        for part in range(parts):
            failed[part] = run_part(job, part, parts, NULL)
    else:
        bi_get_float_state(&state)
        for part in prange(parts, num_threads=threads, schedule="static"):
            failed[part] = run_part(job, part, parts, &state)
    for part in range(parts):
        if failed[part]:
            return failed[part]
    return 0


cdef int64_t find_outside(const bi_ids *ids, int64_t rows, int64_t *value) noexcept nogil:
    """Place in C order of the first id outside 0..rows-1, or -1; the id itself in `value`."""
    cdef int64_t buffer[CHUNK]
    cdef int64_t index[64]
    cdef int axis
    cdef int last = ids.dims - 1
    cdef const char *at = ids.data
    cdef int64_t done = 0, place, count, outside
    for axis in range(last):
        index[axis] = 0
    while True:
        place = 0
        while place < ids.shape[last]:
            count = smaller(CHUNK, ids.shape[last] - place)
            bi_read_ids(ids, at + place * ids.stride[last], ids.stride[last], count, buffer)
            outside = bi_first_outside(buffer, count, rows)
            if outside >= 0:
                value[0] = buffer[outside]
                return done + place + outside
            place += count
        done += ids.shape[last]
        axis = last - 1
        while axis >= 0:
            index[axis] += 1
            at += ids.stride[axis]
            if index[axis] < ids.shape[axis]:
                break
            at -= ids.stride[axis] * ids.shape[axis]
            index[axis] = 0
            axis -= 1
        if axis < 0:
            return -1


cdef int perform(const Job *job, int parts, int threads, int calls, int64_t *place,
                 int64_t *value) noexcept nogil:
    """Check all ids, then compute; 0, or 1 + the role whose id is out of range.

    That id and its place come in `value` and `place`; place -1: another thread changed it after
    the check. `calls` repeats all of it, for those who measure it.
    """
    cdef int role, failed
    # ids that fit one chunk are all checked there, before anything is written
    cdef bint one_chunk = job.leads == 0 and job.tokens <= CHUNK and parts == 1
    for _ in range(calls):
        if not one_chunk:
            for role in range(ROLES):
                if job.ids[role] != NULL:
                    place[0] = find_outside(job.ids[role], job.limit[role], value)
                    if place[0] >= 0:
                        return 1 + role
        failed = run_parts(job, parts, threads)
        if failed:
            place[0] = -1
            if one_chunk:
                place[0] = find_outside(job.ids[failed - 1], job.limit[failed - 1], value)
            return failed
    return 0


cdef void describe_ids(bi_ids *ids, cnp.ndarray array) noexcept:
    cdef int axis
    ids.data = <const char *> cnp.PyArray_DATA(array)
    ids.dims = cnp.PyArray_NDIM(array)
    ids.itemsize = <int> cnp.PyArray_ITEMSIZE(array)
    ids.is_signed = cnp.PyArray_ISSIGNED(array)
    ids.swapped = cnp.PyArray_ISBYTESWAPPED(array)
    for axis in range(ids.dims):
        ids.shape[axis] = cnp.PyArray_DIM(array, axis)
        ids.stride[axis] = cnp.PyArray_STRIDE(array, axis)


cdef bint broadcasts(const bi_ids *ids, const bi_ids *token) noexcept:
    cdef int axis
    cdef int shift = token.dims - ids.dims
    if ids.dims == 0 or shift < 0:
        return False
    for axis in range(ids.dims):
        if ids.shape[axis] != 1 and ids.shape[axis] != token.shape[axis + shift]:
            return False
    return True


cdef void lay_out_tokens(Job *job) noexcept:
    """Strides of all ids over the tokens' shape; axes that lie end to end for all are merged."""
    cdef const bi_ids *token = job.ids[TOKEN]
    cdef int64_t shape[64]
    cdef int64_t stride[3][64]
    cdef int axis, own, role, dims = 0, keep
    cdef bint end_to_end
    # the last axis stays on its own where positions count along it
    job.counted = token.shape[token.dims - 1] > 1 and job.ids[POSITION] == NULL
    for axis in range(token.dims):
        if token.shape[axis] == 1 and axis < token.dims - 1:
            continue
        for role in range(ROLES):
            stride[role][dims] = 0
            if job.ids[role] != NULL:
                own = axis - token.dims + job.ids[role].dims
                if own >= 0 and job.ids[role].shape[own] != 1:
                    stride[role][dims] = job.ids[role].stride[own]
        shape[dims] = token.shape[axis]
        keep = job.counted and axis == token.dims - 1
        end_to_end = dims > 0 and not keep
        if end_to_end:
            for role in range(ROLES):
                if stride[role][dims - 1] != stride[role][dims] * shape[dims]:
                    end_to_end = False
        if end_to_end:
            shape[dims - 1] *= shape[dims]
            for role in range(ROLES):
                stride[role][dims - 1] = stride[role][dims]
        else:
            dims += 1
    job.leads = dims - 1
    job.last = shape[dims - 1]
    for role in range(ROLES):
        job.last_stride[role] = stride[role][dims - 1]
        for axis in range(job.leads):
            job.lead_stride[role][axis] = stride[role][axis]
    for axis in range(job.leads):
        job.lead_shape[axis] = shape[axis]


cdef bint overlap(cnp.ndarray a, cnp.ndarray b) noexcept:
    """Whether the smallest memory ranges that hold the two arrays meet."""
    cdef size_t low[2]
    cdef size_t high[2]
    cdef cnp.ndarray array
    cdef int64_t reach
    cdef int side, axis
    for side in range(2):
        array = a if side == 0 else b
        if cnp.PyArray_SIZE(array) == 0:
            return False
        low[side] = high[side] = <size_t> cnp.PyArray_DATA(array)
        for axis in range(cnp.PyArray_NDIM(array)):
            reach = (cnp.PyArray_DIM(array, axis) - 1) * cnp.PyArray_STRIDE(array, axis)
            if reach < 0:
                low[side] += reach
            else:
                high[side] += reach
        high[side] += <size_t> cnp.PyArray_ITEMSIZE(array)
    return low[0] < high[1] and low[1] < high[0]


cdef class Stage:
    """The prepared stage: up to three tables of one width, and perhaps a LayerNorm.

    `order` names the roles that have a table, in the order in which their rows are added.
    `fits` tells whether the tables go together; if not, `run` raises the error that says why.
    """

    cdef readonly Table token
    cdef readonly Table position
    cdef readonly Table segment
    cdef readonly Norm norm
    cdef Term term[3]
    cdef int types[3]
    cdef int terms
    cdef bint wide
    cdef readonly int64_t width
    cdef readonly bint fits

    def __init__(self, Table token not None, Table position, Table segment, tuple order not None,
                 Norm norm=None):
        self.fill(token, position, segment, order, norm)

    cdef fill(self, Table token, Table position, Table segment, tuple order, Norm norm):
        cdef Table table
        cdef Term *term
        cdef int role
        self.token = token
        self.position = position
        self.segment = segment
        self.norm = norm
        self.width = token.width
        self.terms = 0
        self.fits = True
        for role in order:
            table = self.table(role)
            if table.width != self.width or self.width <= 0 or (
                    role == SEGMENT and table.rows == 0):
                self.fits = False
                return None
            term = &self.term[self.terms]
            term.data = table.data
            term.rows = table.rows
            term.stride = table.stride
            term.role = role
            if table.scale is not None:
                term.scale = &table.scale[0]
                term.scale_step = table.scale.shape[0] > 1
            if table.zero_point is not None:
                term.zero = &table.zero_point[0]
                term.zero_step = table.zero_point.shape[0] > 1
            self.types[self.terms] = table.type
            self.wide |= table.type == BI_F64
            self.terms += 1

    cdef Table table(self, int role):
        return self.token if role == TOKEN else self.position if role == POSITION else self.segment

    cpdef run(self, token_ids, segment_ids, position_ids, attention_mask, dtype, out, num_threads,
              bint normalize, int calls=1):
        """Compute the stage for arguments as callers give them.

        Arrays of integers, float32 and float64 results are known here by their types; all else
        becomes that, or an error, in `_arrays`. Errors come before anything is written, in this
        order: types, shapes, lengths, then ids by role. `calls` repeats the compiled part.
        """
        cdef Job job
        cdef bi_ids ids[3]
        cdef const bi_kernels *kernels
        cdef cnp.npy_intp shape[65]
        cdef int64_t place = 0, value = 0, elements
        cdef int role, k, axis, parts, threads, failed, wanted, result_type
        cdef cnp.ndarray tokens, segments, positions, result, array
        cdef cnp.dtype result_dtype
        cdef Table table
        cdef bint wide
        cdef char few_rows[STACK_BYTES]
        cdef char *allocated

        # Types.
        tokens = as_ids("token_ids", token_ids)
        segments = None if segment_ids is None else as_ids("segment_ids", segment_ids)
        positions = None if position_ids is None else as_ids("position_ids", position_ids)
        mask = None if attention_mask is None else explain().as_mask(attention_mask)
        if dtype is FLOAT32:
            result_type, result_dtype = BI_F32, FLOAT32_DTYPE
        elif dtype is FLOAT64:
            result_type, result_dtype = BI_F64, FLOAT64_DTYPE
        else:
            result_type, result_dtype = explain().result_type(dtype)
        if out is None or (type(out) is np_ndarray and (<cnp.ndarray> out).dtype is result_dtype):
            result = out
        else:
            result = explain().as_out(out, result_dtype)
        wanted = 0 if num_threads is None else as_threads(num_threads)
        wide = self.wide or result_type == BI_F64

        # Shapes.
        if not self.fits:
            raise explain().unfit_tables(self)
        if mask is not None:
            explain().check_mask(mask, tokens, result)
        describe_ids(&ids[TOKEN], tokens)
        if ids[TOKEN].dims == 0:
            raise explain().no_dimensions("token_ids")
        job.ids[TOKEN] = &ids[TOKEN]
        job.ids[POSITION] = describe_along(&ids[POSITION], positions, &ids[TOKEN])
        job.ids[SEGMENT] = describe_along(&ids[SEGMENT], segments, &ids[TOKEN])
        if positions is not None and job.ids[POSITION] == NULL:
            raise explain().no_broadcast("position_ids", positions, tokens)
        if segments is not None and job.ids[SEGMENT] == NULL:
            raise explain().no_broadcast("segment_ids", segments, tokens)
        for axis in range(ids[TOKEN].dims):
            shape[axis] = ids[TOKEN].shape[axis]
        shape[ids[TOKEN].dims] = self.width
        if result is not None and not is_result(result, shape, ids[TOKEN].dims + 1):
            raise explain().unfit_out(result, tokens, self.width)
        job.tokens = cnp.PyArray_SIZE(tokens)

        # Lengths.
        for role in range(ROLES):
            job.limit[role] = -1
        for k in range(self.terms):
            job.limit[self.term[k].role] = self.term[k].rows
        if (job.limit[POSITION] >= 0 and job.ids[POSITION] == NULL and job.tokens
                and ids[TOKEN].shape[ids[TOKEN].dims - 1] > job.limit[POSITION]):
            raise explain().too_long(tokens, job.limit[POSITION])
        for role in range(ROLES):
            if job.limit[role] < 0:
                job.ids[role] = NULL

        # The result.
        if result is None:
            result = new_result(shape, ids[TOKEN].dims + 1, result_dtype,
                                <double> job.tokens * self.width * result_dtype.itemsize)
        else:
            for role in range(ROLES):
                table = self.table(role)
                array = tokens if role == TOKEN else positions if role == POSITION else segments
                if array is not None and overlap(result, array):
                    raise explain().overlapping_out(f"{ROLE_NAMES[role]}_ids")
                if table is not None and overlap(result, table.given):
                    raise explain().overlapping_out(f"{ROLE_NAMES[role]}_embeddings")
        if job.tokens == 0:
            return result  # nothing is looked up, so nothing can be out of range
        elements = job.tokens * self.width

        # The work, and who shares it.
        lay_out_tokens(&job)
        kernels = bi_kernels_for(chosen_isa, wide)
        for k in range(self.terms):
            job.term[k] = self.term[k]
            job.term[k].fold = kernels.add[self.types[k]] if k else kernels.fold[0][self.types[k]]
        job.terms = self.terms
        job.fold = kernels.fold[self.terms - 1][self.types[0]]
        for k in range(1, self.terms):
            if self.types[k] != self.types[0]:
                job.fold = NULL
        job.norm = NULL
        if normalize and self.norm is not None:
            job.norm = kernels.norm
            job.vectors.eps = self.norm.eps
            if wide:
                job.vectors.weight = &self.norm.vectors64[0, 0]
                job.vectors.bias = &self.norm.vectors64[1, 0]
            else:
                job.vectors.weight = &self.norm.vectors32[0, 0]
                job.vectors.bias = &self.norm.vectors32[1, 0]
        job.round = kernels.round[result_type]
        job.width = self.width
        job.row_bytes = (self.width * (8 if wide else 4) + 63) // 64 * 64
        job.ahead_bytes = smaller(
            self.width * cnp.PyArray_ITEMSIZE(self.token.values), AHEAD_BYTES)
        job.out_bytes = self.width * cnp.PyArray_ITEMSIZE(result)
        job.out = <char *> cnp.PyArray_DATA(result)
        job.stream = (BI_STREAMS and job.round == NULL
                      and (job.norm != NULL or job.fold != NULL)
                      and job.tokens * job.out_bytes >= STREAM_BYTES
                      and <size_t> job.out % cnp.PyArray_ITEMSIZE(result) == 0)
        parts = <int> smaller(smaller(wanted if wanted > 0 else 1, MAX_PARTS), job.tokens)
        threads = 1
        if BI_OPENMP and not bi_forked and wanted != 1 and elements >= TEAM_ELEMENTS:
            threads = <int> smaller(available_cpus(wanted), elements // SHARE_ELEMENTS)
            threads = <int> smaller(smaller(threads, MAX_PARTS), job.tokens)
            if wanted == 0:
                parts = threads
        allocated = NULL
        job.scratch = <char *> (<size_t> (few_rows + 63) // 64 * 64)
        job.scratch_bytes = 2 * smaller(BI_NORM_ROWS, job.tokens) * job.row_bytes
        if ((job.norm != NULL or job.round != NULL)
                and parts * job.scratch_bytes > <int64_t> sizeof(few_rows) - 63):
            allocated = job.scratch = <char *> malloc(parts * job.scratch_bytes)
            if job.scratch == NULL:
                raise MemoryError(f"no memory for {parts} times {job.scratch_bytes} bytes of "
                                  "work space")
        if elements >= GIL_ELEMENTS:
            with nogil:
                failed = perform(&job, parts, threads, calls, &place, &value)
        else:
            failed = perform(&job, parts, threads, calls, &place, &value)
        free(allocated)
        if failed and place >= 0:
            raise explain().out_of_range(
                ROLE_NAMES[failed - 1], (tokens, positions, segments)[failed - 1], place, value,
                job.limit[failed - 1])
        if failed:
            raise explain().changed_meanwhile(ROLE_NAMES[failed - 1])
        return result


cdef PyDataMem_Handler pool_handler
strcpy(pool_handler.name, "bertinput")
pool_handler.version = 1
pool_handler.allocator.ctx = NULL
pool_handler.allocator.malloc = bi_pool_malloc
pool_handler.allocator.calloc = bi_pool_calloc
pool_handler.allocator.realloc = bi_pool_realloc
pool_handler.allocator.free = bi_pool_free
cdef object pool_capsule = PyCapsule_New(&pool_handler, "mem_handler", NULL)


cdef cnp.ndarray new_result(const cnp.npy_intp *shape, int dims, cnp.dtype dtype, double nbytes):
    """An uninitialised array; a large one from the pool."""
    Py_INCREF(dtype)  # PyArray_Empty keeps this reference
    if nbytes < POOL_LEAST or nbytes > bi_pool_limit():
        return PyArray_Empty(dims, shape, dtype, 0)
    before = PyDataMem_SetHandler(pool_capsule)
    try:
        return PyArray_Empty(dims, shape, dtype, 0)
    finally:
        PyDataMem_SetHandler(before)


POOL_MOST = <size_t> -1 // 2


def pool_limit():
    """The most bytes that the pool may hold."""
    return bi_pool_limit()


def pool_held():
    """The bytes that it holds."""
    return bi_pool_held()


def pool_set_limit(size_t limit):
    """Set the limit, and give back what exceeds it."""
    bi_pool_set_limit(limit)


def pool_trim():
    """Give everything back, and return how many bytes that was."""
    return bi_pool_trim()


def embed(token_ids, segment_ids, token_embeddings, position_embeddings, segment_embeddings,
          position_ids, dtype, out, num_threads):
    """One call with tables that are not kept: see `bertinput.bert_embeddings`."""
    cdef Stage stage = Stage.__new__(Stage)
    stage.fill(as_table("token_embeddings", token_embeddings),
               as_table("position_embeddings", position_embeddings),
               as_table("segment_embeddings", segment_embeddings),
               (TOKEN, POSITION, SEGMENT),  # the seed's order of addition
               None)
    return stage.run(token_ids, segment_ids, position_ids, None, dtype, out, num_threads, False)


cdef Table as_table(str name, value):
    """A table, of any shape."""
    cdef Table table
    cdef int kind, number
    if type(value) is np_ndarray:
        number = cnp.PyArray_TYPE(<cnp.ndarray> value)
        kind = (BI_F64 if number == cnp.NPY_DOUBLE else BI_F32 if number == cnp.NPY_FLOAT
                else BI_F16 if number == cnp.NPY_FLOAT16 else -1)
        if kind >= 0:
            table = Table.__new__(Table)
            table.fill(<cnp.ndarray> value, kind, <cnp.ndarray> value, None, None)
            return table
    return explain().as_table(name, value)


cdef object np_ndarray = np.ndarray
cdef object FLOAT32 = np.float32
cdef object FLOAT64 = np.float64
cdef cnp.dtype FLOAT32_DTYPE = np.dtype(np.float32)
cdef cnp.dtype FLOAT64_DTYPE = np.dtype(np.float64)


cdef cnp.ndarray as_ids(str name, ids):
    """Ids as an array of integers."""
    if type(ids) is np_ndarray and cnp.PyArray_ISINTEGER(<cnp.ndarray> ids):
        return <cnp.ndarray> ids
    return explain().as_ids(name, ids)


cdef int as_threads(num_threads) except -1:
    """The number of threads that was asked for."""
    if PyLong_CheckExact(num_threads) and 0 < num_threads <= MAX_PARTS:
        return num_threads
    return explain().as_threads(num_threads)


cdef object explain():
    """The module that puts errors into words; imported here, since it imports this one."""
    from bertinput import _arrays
    return _arrays


cdef int64_t available_cpus(int num_threads) except -1:
    """CPUs for a call that asked for `num_threads` (0: for no number)."""
    if num_threads:
        return smaller(num_threads, _threads.affinity())
    return smaller(_threads.available(), omp_get_max_threads())


cdef const bi_ids *describe_along(bi_ids *ids, cnp.ndarray array, const bi_ids *token) noexcept:
    """Describe ids that accompany the token ids; NULL where absent or of another shape."""
    if array is None:
        return NULL
    describe_ids(ids, array)
    return ids if broadcasts(ids, token) else NULL


cdef bint is_result(cnp.ndarray out, const cnp.npy_intp *shape, int dims) noexcept:
    """Whether `out` may be written as a C-contiguous array of this shape."""
    cdef int axis
    if (cnp.PyArray_NDIM(out) != dims or not cnp.PyArray_IS_C_CONTIGUOUS(out)
            or not cnp.PyArray_ISWRITEABLE(out)):
        return False
    for axis in range(dims):
        if cnp.PyArray_DIM(out, axis) != shape[axis]:
            return False
    return True


cdef int choose_isa() except -1:
    """The widest instruction set that this CPU has, or the one that BERTINPUT_ISA names."""
    cdef const char *asked = getenv("BERTINPUT_ISA")
    cdef int isa
    if asked != NULL and asked[0] == 0:
        asked = NULL  # empty means unset
    for isa in range(BI_ISAS - 1, -1, -1):
        if bi_isa_built(isa) and bi_isa_runs_here(isa):
            if asked == NULL or strcmp(asked, bi_isa_names[isa]) == 0:
                return isa
    name = asked.decode(errors="replace")
    raise ImportError(
        f"BERTINPUT_ISA={name!r} names none of the instruction sets that this build and this CPU "
        f"share: {', '.join(instruction_sets())}")


def instruction_sets():
    """Names of the instruction sets that this build and this CPU share."""
    return [bi_isa_names[isa].decode() for isa in range(BI_ISAS)
            if bi_isa_built(isa) and bi_isa_runs_here(isa)]


def build_facts():
    """What the compiler left behind: see `bertinput.build_info`."""
    return {
        "openmp": BI_OPENMP or None,
        "instruction_sets": [bi_isa_names[isa].decode() for isa in range(BI_ISAS)
                             if bi_isa_built(isa)],
        "instruction_set": bi_isa_names[chosen_isa].decode(),
        "compiler": BI_COMPILER.decode().strip(),
        "cython": ".".join(str(CYTHON_HEX_VERSION >> shift & 255) for shift in (24, 16, 8)),
    }


def in_forked_child():
    """Whether this process was forked after the package was loaded."""
    return bool(bi_forked)


cdef int chosen_isa = choose_isa()
# LLVM's OpenMP runtime reads OMP_WAIT_POLICY at the first call, not when it is loaded.
omp_get_max_threads()
if bi_watch_forks() != 0:
    raise ImportError("pthread_atfork failed: no memory")
