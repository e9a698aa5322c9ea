/* A library that stands where the driver's libnvidia-ml.so.1 stands: what pynvml calls by way of ctypes, with nvml.h's structures.
   One whole GPU (0) and one that falls off the bus when it is told so (1). Structures that carry a version are refused without it. */

#include <string.h>
#include <unistd.h>

typedef struct device { int index; } *Device;
typedef unsigned long long u64;
enum { OK, UNINITIALIZED, INVALID, NOT_SUPPORTED, TIMEOUT = 10, LOST = 15, SIZE = 7, VERSION = 25 };

static struct device devices[2] = {{0}, {1}};
static int started, lost, reported, samples, pool[8], allocated;

void fall_off_the_bus(void) { lost = 1; }

#define ASKED(d) if (!started) return UNINITIALIZED; if (lost && (d)->index) return LOST

int nvmlInitWithFlags(unsigned flags) { started++; return OK; }
int nvmlInit_v2(void) { started++; return OK; }
int nvmlShutdown(void) { if (!started) return UNINITIALIZED; started--; return OK; }
const char *nvmlErrorString(int code) { return "GPU is lost"; }
int nvmlSystemGetDriverVersion(char *text, unsigned size) { strcpy(text, "580.65.06"); return OK; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 2; return OK; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, Device *d) { *d = &devices[index]; return OK; }
int nvmlDeviceGetUUID(Device d, char *text, unsigned size) { ASKED(d); strcpy(text, d->index ? "GPU-bb" : "GPU-aa"); return OK; }
int nvmlDeviceGetName(Device d, char *text, unsigned size) { ASKED(d); strcpy(text, "NVIDIA H200"); return OK; }

struct pci { char legacy[16]; unsigned domain, bus, device, id, subsystem; char bus_id[32]; };
int nvmlDeviceGetPciInfo_v3(Device d, struct pci *p) { ASKED(d); strcpy(p->bus_id, "00000000:3B:00.0"); return OK; }

struct rates { unsigned gpu, memory; };
int nvmlDeviceGetUtilizationRates(Device d, struct rates *r) { ASKED(d); r->gpu = 97; r->memory = 41; return OK; }

struct memory { unsigned version; u64 total, reserved, free, used; };
int nvmlDeviceGetMemoryInfo_v2(Device d, struct memory *m) {
    ASKED(d);
    if (m->version != (sizeof *m | 2u << 24)) return VERSION;
    m->total = 150000000000, m->reserved = 600000000, m->used = 30000000000, m->free = m->total - m->reserved - m->used;
    return OK;
}
struct old_memory { u64 total, free, used; };
int nvmlDeviceGetMemoryInfo(Device d, struct old_memory *m) {
    ASKED(d);
    m->total = 150000000000, m->used = 30600000000, m->free = m->total - m->used;
    return OK;
}

int nvmlDeviceGetPowerUsage(Device d, unsigned *mw) { ASKED(d); *mw = 612345; return OK; }
int nvmlDeviceGetEnforcedPowerLimit(Device d, unsigned *mw) { ASKED(d); *mw = 700000; return OK; }
int nvmlDeviceGetTotalEnergyConsumption(Device d, u64 *mj) { static u64 used = 1ull << 40; ASKED(d); *mj = used += 500; return OK; }
int nvmlDeviceGetTemperature(Device d, int sensor, unsigned *c) { ASKED(d); *c = 61; return OK; }
int nvmlDeviceGetClockInfo(Device d, int type, unsigned *mhz) { ASKED(d); *mhz = type == 1 ? 1980 : 3201; return OK; }
int nvmlDeviceGetCurrentClocksEventReasons(Device d, u64 *bits) { ASKED(d); *bits = 0x4 | 0x1; return OK; }
int nvmlDeviceGetFanSpeed(Device d, unsigned *pct) { return NOT_SUPPORTED; }
int nvmlDeviceGetCurrPcieLinkGeneration(Device d, unsigned *n) { *n = 5; return OK; }
int nvmlDeviceGetCurrPcieLinkWidth(Device d, unsigned *n) { *n = 16; return OK; }
int nvmlDeviceGetMaxPcieLinkGeneration(Device d, unsigned *n) { *n = 5; return OK; }
int nvmlDeviceGetMaxPcieLinkWidth(Device d, unsigned *n) { *n = 16; return OK; }
int nvmlDeviceGetMigMode(Device d, unsigned *now, unsigned *next) { *now = *next = 0; return OK; }

struct field { unsigned id, scope; long long time, latency; int type, code; union { double d; unsigned u; u64 all; } value; };
int nvmlDeviceGetFieldValues(Device d, int count, struct field *f) {
    ASKED(d);
    for (; count--; f++) {
        f->code = f->id == 38 ? NOT_SUPPORTED : OK;
        f->value.all = 0xffffffff00000000; /* what lay there before: only the member of the type counts */
        if (f->id == 82) f->type = 1, f->value.u = 70;
        else f->type = 3, f->value.all = f->id;
    }
    return OK;
}

struct process { unsigned pid; u64 used; unsigned gpu_instance, compute_instance; };
int nvmlDeviceGetComputeRunningProcesses_v3(Device d, unsigned *count, struct process *p) {
    unsigned room = *count;
    ASKED(d);
    *count = 2;
    if (room < 2) return SIZE;
    p[0] = (struct process){getpid(), 12345678}, p[1] = (struct process){1, ~0ull};
    return OK;
}
struct use { unsigned pid; u64 time; unsigned sm, memory, encoder, decoder; };
int nvmlDeviceGetProcessUtilization(Device d, struct use *u, unsigned *count, u64 since) {
    ASKED(d);
    *count = 1;
    if (!u) return SIZE;
    *u = (struct use){getpid(), since + 1000, 55};
    return OK;
}

struct support { unsigned version, supported; };
int nvmlGpmQueryDeviceSupport(Device d, struct support *s) { ASKED(d); s->supported = 1; return s->version == 1 ? OK : VERSION; }
int nvmlGpmSampleAlloc(int **sample) { *sample = &pool[allocated++]; return OK; }
int nvmlGpmSampleGet(Device d, int *sample) { ASKED(d); *sample = ++samples; return OK; }
struct metric { unsigned id; int code; double value; const char *names[3]; };
struct metrics { unsigned version, count; int *first, *second; struct metric metrics[333]; };
int nvmlGpmMetricsGet(struct metrics *m) {
    if (m->version != 1) return VERSION;
    if (*m->first >= *m->second) return INVALID;
    for (unsigned n = 0; n < m->count; n++) {
        m->metrics[n].code = m->metrics[n].id >= 60 ? NOT_SUPPORTED : OK;
        m->metrics[n].value = m->metrics[n].id * 1.5;
    }
    return OK;
}

int nvmlEventSetCreate(int **set) { *set = &pool[7]; return OK; }
int nvmlDeviceGetSupportedEventTypes(Device d, u64 *types) { ASKED(d); *types = 0x1f; return OK; }
int nvmlDeviceRegisterEvents(Device d, u64 types, int *set) { ASKED(d); return types == 8 && set == &pool[7] ? OK : INVALID; }
struct event { Device device; u64 type, data; unsigned gpu_instance, compute_instance; };
int nvmlEventSetWait_v2(int *set, struct event *e, unsigned ms) {
    if (!lost || reported) return TIMEOUT;
    reported = 1, *e = (struct event){&devices[1], 8, 79};
    return OK;
}
