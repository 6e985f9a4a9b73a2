// HCCL between the processes of one host. A communicator is one piece of shared memory: a slot per rank for
// collectives, a mailbox per ordered pair of ranks for point to point, and futexes to wait on.
//
// The memory is a memfd that the root process holds open until all ranks have attached through /proc/<pid>/fd; it has
// no name, so a rank killed at any moment leaves nothing behind in /dev/shm.
//
// A call returns when its work is done (a stream has nothing to wait for). A peer that does not come, or comes with
// another operation, is an error as on hardware: HCCL_E_TIMEOUT after HCCL_EXEC_TIMEOUT seconds, HCCL_E_PARA.
#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <hccl/hccl.h>

#include "cann.h"

namespace {

using Clock = std::chrono::steady_clock;

constexpr uint32_t kMaxRanks = 64;
constexpr size_t kChunk = 1 << 20;  // bytes that a slot or a mailbox holds

// What the ranks of a collective must agree on.
struct Call {
    char name[24];
    uint64_t count;
    uint32_t data_type, reduce_op, root;
};

struct Mailbox {
    std::atomic<uint32_t> full;
    uint64_t total;  // bytes of the whole message, for the receiver to compare with what it expects
    uint64_t bytes;  // bytes in `data`
    alignas(64) char data[kChunk];
};

struct Shared {  // the head of the shared memory; slots and mailboxes follow it
    uint64_t nonce;
    std::atomic<uint32_t> broken;      // a rank gave up: no operation on this communicator can succeed any more
    std::atomic<uint32_t> arrived;     // ranks that wait at the current barrier
    std::atomic<uint32_t> generation;  // barriers passed; futex
    std::atomic<uint32_t> mail;        // changes of any mailbox; futex
    std::atomic<uint32_t> reached[kMaxRanks];  // barriers that each rank has reached, to name the missing ones
    Call calls[kMaxRanks];
};

struct RootInfo {  // what rank 0 hands to the others through torch's store
    char magic[8];
    int32_t pid, fd;
    uint64_t nonce;
};
static_assert(sizeof(RootInfo) <= HCCL_ROOT_INFO_BYTES);
constexpr char kMagic[8] = "SIMHCCL";

double seconds(const char* variable, double fallback)
{
    return std::stod(sim::setting(variable, std::to_string(fallback)));
}

void futex_wait(std::atomic<uint32_t>& word, uint32_t seen, double limit_s)
{
    timespec limit{static_cast<time_t>(limit_s), static_cast<long>((limit_s - static_cast<time_t>(limit_s)) * 1e9)};
    syscall(SYS_futex, &word, FUTEX_WAIT, seen, &limit, nullptr, 0);
}

void futex_wake(std::atomic<uint32_t>& word) { syscall(SYS_futex, &word, FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0); }

class Deadline {  // 0 seconds means never, as for HCCL_EXEC_TIMEOUT=0
public:
    explicit Deadline(double limit_s) : limit_s_(limit_s), start_(Clock::now()) {}
    bool passed() const { return limit_s_ > 0 && remaining() <= 0; }
    double next_wait() const { return limit_s_ > 0 ? std::clamp(remaining(), 1e-4, 1.0) : 1.0; }

private:
    double remaining() const { return limit_s_ - std::chrono::duration<double>(Clock::now() - start_).count(); }
    double limit_s_;
    Clock::time_point start_;
};

size_t element_size(HcclDataType type)
{
    switch (type) {
        case HCCL_DATA_TYPE_INT8:
        case HCCL_DATA_TYPE_UINT8: return 1;
        case HCCL_DATA_TYPE_INT16:
        case HCCL_DATA_TYPE_UINT16:
        case HCCL_DATA_TYPE_FP16:
        case HCCL_DATA_TYPE_BFP16: return 2;
        case HCCL_DATA_TYPE_INT32:
        case HCCL_DATA_TYPE_UINT32:
        case HCCL_DATA_TYPE_FP32: return 4;
        default: return 8;
    }
}

template <typename T, typename Accumulator>
void reduce_as(char* to, const std::vector<const char*>& from, size_t bytes, HcclReduceOp op)
{
    for (size_t i = 0; i < bytes / sizeof(T); ++i) {
        auto value = static_cast<Accumulator>(reinterpret_cast<const T*>(from[0])[i]);
        for (size_t rank = 1; rank < from.size(); ++rank) {
            const auto other = static_cast<Accumulator>(reinterpret_cast<const T*>(from[rank])[i]);
            switch (op) {
                case HCCL_REDUCE_SUM: value = value + other; break;
                case HCCL_REDUCE_PROD: value = value * other; break;
                case HCCL_REDUCE_MAX: value = std::max(value, other); break;
                default: value = std::min(value, other);
            }
        }
        reinterpret_cast<T*>(to)[i] = static_cast<T>(value);
    }
}

// The types that HCCL reduces. Half precision is summed in fp32 and rounded once; the order is that of the ranks, so
// all ranks get the same bits.
bool reduce(char* to, const std::vector<const char*>& from, size_t bytes, HcclDataType type, HcclReduceOp op)
{
    switch (type) {
        case HCCL_DATA_TYPE_INT8: reduce_as<int8_t, int8_t>(to, from, bytes, op); return true;
        case HCCL_DATA_TYPE_INT16: reduce_as<int16_t, int16_t>(to, from, bytes, op); return true;
        case HCCL_DATA_TYPE_INT32: reduce_as<int32_t, int32_t>(to, from, bytes, op); return true;
        case HCCL_DATA_TYPE_INT64: reduce_as<int64_t, int64_t>(to, from, bytes, op); return true;
        case HCCL_DATA_TYPE_FP32: reduce_as<float, float>(to, from, bytes, op); return true;
        case HCCL_DATA_TYPE_FP16: reduce_as<c10::Half, float>(to, from, bytes, op); return true;
        case HCCL_DATA_TYPE_BFP16: reduce_as<c10::BFloat16, float>(to, from, bytes, op); return true;
        default: return false;
    }
}

struct Transfer {
    bool send;
    uint32_t peer;
    char* buffer;
    uint64_t bytes;
    uint64_t done = 0;
    bool finished = false;
};

class Communicator {
public:
    uint32_t ranks, rank;

    Communicator(uint32_t ranks, uint32_t rank, double timeout_s)
        : ranks(ranks), rank(rank), timeout_s_(timeout_s) {}

    ~Communicator()
    {
        if (shared_ != nullptr) munmap(shared_, size());
    }

    HcclResult attach(const RootInfo& root)
    {
        const std::string path = "/proc/" + std::to_string(root.pid) + "/fd/" + std::to_string(root.fd);
        const int fd = open(path.c_str(), O_RDWR | O_CLOEXEC);
        if (fd < 0) return fail(HCCL_E_TCP_CONNECT, "the root process " + std::to_string(root.pid) + " is gone");
        void* memory = MAP_FAILED;
        if (ftruncate(fd, static_cast<off_t>(size())) == 0)
            memory = mmap(nullptr, size(), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        close(fd);
        if (memory == MAP_FAILED) return fail(HCCL_E_MEMORY, "cannot map the communicator");
        shared_ = static_cast<Shared*>(memory);
        if (shared_->nonce != root.nonce)
            return fail(HCCL_E_TCP_CONNECT, "the root process has closed the communicator");
        const HcclResult result = barrier("attaching (HCCL_CONNECT_TIMEOUT)", seconds("HCCL_CONNECT_TIMEOUT", 120));
        if (rank == 0) close(root.fd);
        return result;
    }

    // Runs a collective: `length` bytes go through the slots chunk by chunk. `post` writes this rank's bytes
    // [offset, offset + n) into its slot, `take` reads the slots of all ranks.
    using Post = std::function<void(char* slot, size_t offset, size_t n)>;
    using Take = std::function<void(const std::vector<const char*>& slots, size_t offset, size_t n)>;

    HcclResult collective(const Call& call, size_t length, const Post& post, const Take& take)
    {
        shared_->calls[rank] = call;
        std::vector<const char*> slots;
        for (uint32_t r = 0; r < ranks; ++r) slots.push_back(slot(r));
        size_t offset = 0;
        do {
            const size_t n = std::min(kChunk, length - offset);
            post(slot(rank), offset, n);
            if (const HcclResult result = barrier(call.name, timeout_s_)) return result;
            const std::string mismatch = offset == 0 ? compare_calls() : "";
            if (mismatch.empty()) take(slots, offset, n);
            // All ranks come here, mismatch or not: none may touch its slot or its call while another still reads them.
            if (const HcclResult result = barrier(call.name, timeout_s_)) return result;
            if (!mismatch.empty()) return fail(HCCL_E_PARA, mismatch);
            offset += n;
        } while (offset < length);
        return HCCL_SUCCESS;
    }

    // Moves messages through the mailboxes until all are done. Those with the same peer and direction keep their order.
    // A send is done when its last chunk is in the mailbox: up to kChunk bytes need no receiver yet.
    HcclResult exchange(std::vector<Transfer>& transfers)
    {
        Deadline deadline(timeout_s_);
        for (;;) {
            const uint32_t seen = shared_->mail;
            bool all_finished = true, progress = false;
            std::set<std::pair<bool, uint32_t>> waiting;
            for (Transfer& transfer : transfers) {
                if (transfer.finished || waiting.count({transfer.send, transfer.peer}) != 0) continue;
                Mailbox& box = transfer.send ? mailbox(rank, transfer.peer) : mailbox(transfer.peer, rank);
                if ((box.full != 0) == transfer.send) {
                    waiting.insert({transfer.send, transfer.peer});
                } else {
                    if (const HcclResult result = move_chunk(transfer, box)) return result;
                    progress = true;
                    if (!transfer.finished) waiting.insert({transfer.send, transfer.peer});
                }
                all_finished = all_finished && transfer.finished;
            }
            if (progress) {
                ++shared_->mail;
                futex_wake(shared_->mail);
                deadline = Deadline(timeout_s_);
            }
            if (all_finished) return HCCL_SUCCESS;
            if (shared_->broken != 0) return broken("send/receive");
            if (deadline.passed()) {
                give_up();
                const Transfer& first = *std::find_if(transfers.begin(), transfers.end(),
                                                      [](const Transfer& t) { return !t.finished; });
                return fail(HCCL_E_TIMEOUT, "EI0002: time-out: " + who() + " waited for rank " +
                            std::to_string(first.peer) + (first.send ? " to receive" : " to send"));
            }
            if (!progress) futex_wait(shared_->mail, seen, deadline.next_wait());
        }
    }

private:
    static size_t head_size() { return (sizeof(Shared) + 4095) / 4096 * 4096; }
    size_t size() const { return head_size() + ranks * kChunk + sizeof(Mailbox) * ranks * ranks; }
    char* base() { return reinterpret_cast<char*>(shared_) + head_size(); }
    char* slot(uint32_t r) { return base() + r * kChunk; }
    Mailbox& mailbox(uint32_t from, uint32_t to)
    {
        return reinterpret_cast<Mailbox*>(base() + ranks * kChunk)[from * ranks + to];
    }

    std::string who() const { return "rank " + std::to_string(rank) + " of " + std::to_string(ranks); }
    static HcclResult fail(HcclResult code, const std::string& message)
    {
        return static_cast<HcclResult>(sim::fail(code, message));
    }

    void give_up()
    {
        shared_->broken = 1;
        futex_wake(shared_->generation);
        futex_wake(shared_->mail);
    }

    HcclResult broken(const char* name)
    {
        return fail(HCCL_E_REMOTE, std::string(name) + ": another rank of this communicator has given up");
    }

    // Empty if all ranks run the same operation; else how this rank's differs from another's. If not all are the same,
    // each rank finds one that differs from its own.
    std::string compare_calls() const
    {
        const auto describe = [this](uint32_t r) {
            const Call& c = shared_->calls[r];
            std::ostringstream text;
            text << "rank " << r << " runs " << c.name << " count " << c.count << " type " << c.data_type << " op "
                 << c.reduce_op << " root " << c.root;
            return text.str();
        };
        for (uint32_t r = 0; r < ranks; ++r)
            if (std::memcmp(&shared_->calls[r], &shared_->calls[rank], sizeof(Call)) != 0)
                return "EI0005: inconsistent collective: " + describe(rank) + ", " + describe(r);
        return "";
    }

    HcclResult barrier(const char* name, double limit_s)
    {
        if (shared_->broken != 0) return broken(name);
        const uint32_t current = shared_->generation;
        ++shared_->reached[rank];
        if (++shared_->arrived == ranks) {
            shared_->arrived = 0;
            ++shared_->generation;
            futex_wake(shared_->generation);
            return HCCL_SUCCESS;
        }
        for (Deadline deadline(limit_s); shared_->generation == current;) {
            if (shared_->broken != 0) return broken(name);
            if (deadline.passed()) {
                give_up();
                std::string missing;
                for (uint32_t r = 0; r < ranks; ++r)
                    if (shared_->reached[r] != shared_->reached[rank]) missing += " " + std::to_string(r);
                return fail(HCCL_E_TIMEOUT, std::string("EI0002: time-out in ") + name + ": " + who()
                            + " waited for rank" + missing);
            }
            futex_wait(shared_->generation, current, deadline.next_wait());
        }
        return HCCL_SUCCESS;
    }

    HcclResult move_chunk(Transfer& transfer, Mailbox& box)
    {
        if (transfer.send) {
            box.total = transfer.bytes;
            box.bytes = std::min<uint64_t>(kChunk, transfer.bytes - transfer.done);
            std::memcpy(box.data, transfer.buffer + transfer.done, box.bytes);
        } else {
            if (box.total != transfer.bytes)
                return fail(HCCL_E_PARA, "EI0005: " + who() + " expects " + std::to_string(transfer.bytes)
                            + " bytes from rank " + std::to_string(transfer.peer) + ", which sent "
                            + std::to_string(box.total));
            std::memcpy(transfer.buffer + transfer.done, box.data, box.bytes);
        }
        transfer.done += box.bytes;
        transfer.finished = transfer.done == transfer.bytes;
        box.full = transfer.send ? 1 : 0;
        return HCCL_SUCCESS;
    }

    double timeout_s_;
    Shared* shared_ = nullptr;
};

Communicator& get(HcclComm comm) { return *static_cast<Communicator*>(comm); }

Call describe(const char* name, uint64_t count, HcclDataType type, uint32_t op = 0, uint32_t root = 0)
{
    Call call;
    std::memset(&call, 0, sizeof(call));  // the padding too: calls are compared with memcmp
    std::strncpy(call.name, name, sizeof(call.name) - 1);
    call.count = count;
    call.data_type = type;
    call.reduce_op = op;
    call.root = root;
    return call;
}

// Copies the part of a chunk [offset, offset + n) that lies in the segment of `length` bytes starting at `begin`.
template <typename Copy>
void with_overlap(size_t begin, size_t length, size_t offset, size_t n, Copy copy)
{
    const size_t from = std::max(begin, offset), to = std::min(begin + length, offset + n);
    if (from < to) copy(from - offset, from - begin, to - from);  // (position in chunk, in segment, bytes)
}

// A configuration begins with its size; that of an older torch_npu (2.6) ends before the newer fields.
size_t size_of(const HcclCommConfig& config)
{
    size_t size;
    std::memcpy(&size, &config, sizeof(size));
    return size;
}

bool reducible(HcclDataType type) { return reduce(nullptr, {nullptr}, 0, type, HCCL_REDUCE_SUM); }

HcclResult not_reducible(HcclDataType type)
{
    return static_cast<HcclResult>(
        sim::fail(HCCL_E_NOT_SUPPORT, "HCCL does not reduce data type " + std::to_string(type)));
}

}  // namespace

extern "C" {

HcclResult HcclGetRootInfo(HcclRootInfo* info)
{
    const int fd = static_cast<int>(syscall(SYS_memfd_create, "simulated-hccl", 1u /* MFD_CLOEXEC */));
    if (fd < 0 || ftruncate(fd, sizeof(Shared)) != 0) return HCCL_E_SYSCALL;
    RootInfo root{};
    std::memcpy(root.magic, kMagic, sizeof(kMagic));
    root.pid = getpid();
    root.fd = fd;
    std::random_device random;
    root.nonce = (static_cast<uint64_t>(random()) << 32 | random()) | 1;
    static_assert(offsetof(Shared, nonce) == 0);
    if (write(fd, &root.nonce, sizeof(root.nonce)) != sizeof(root.nonce)) return HCCL_E_SYSCALL;
    std::memset(info, 0, sizeof(*info));
    std::memcpy(info, &root, sizeof(root));
    return HCCL_SUCCESS;
}

HcclResult HcclCommInitRootInfoConfig(uint32_t ranks, const HcclRootInfo* info, uint32_t rank,
                                      const HcclCommConfig* config, HcclComm* comm)
{
    RootInfo root;
    std::memcpy(&root, info, sizeof(root));
    if (std::memcmp(root.magic, kMagic, sizeof(kMagic)) != 0 || ranks == 0 || ranks > kMaxRanks || rank >= ranks)
        return static_cast<HcclResult>(sim::fail(HCCL_E_PARA, "bad root info, or rank " + std::to_string(rank) + " of "
                                                 + std::to_string(ranks)));
    double timeout_s = seconds("HCCL_EXEC_TIMEOUT", 1836);
    if (config != nullptr && size_of(*config) > offsetof(HcclCommConfig, hcclExecTimeOut)
        && config->hcclExecTimeOut != HCCL_COMM_EXECTIMEOUT_CONFIG_NOT_SET)
        timeout_s = config->hcclExecTimeOut;
    auto created = std::make_unique<Communicator>(ranks, rank, timeout_s);
    if (const HcclResult result = created->attach(root)) return result;
    *comm = created.release();
    return HCCL_SUCCESS;
}

HcclResult HcclCommInitRootInfo(uint32_t ranks, const HcclRootInfo* info, uint32_t rank, HcclComm* comm)
{
    return HcclCommInitRootInfoConfig(ranks, info, rank, nullptr, comm);
}

// torch_npu sets a field of the configuration only if its number is below this one.
uint32_t HcclGetCommConfigCapability() { return HCCL_COMM_CONFIG_EXEC_TIMEOUT + 1; }

HcclResult HcclCommDestroy(HcclComm comm)
{
    delete &get(comm);
    return HCCL_SUCCESS;
}

HcclResult HcclGetCommAsyncError(HcclComm, HcclResult* error)
{
    *error = HCCL_SUCCESS;  // errors are returned by the call that makes them
    return HCCL_SUCCESS;
}

HcclResult HcclGetCommName(HcclComm comm, char* name)
{
    std::snprintf(name, COMM_NAME_MAX_LENGTH, "simulated-%p", comm);
    return HCCL_SUCCESS;
}

HcclResult HcclSetConfig(HcclConfig, HcclConfigValue) { return HCCL_SUCCESS; }

const char* HcclGetErrorString(HcclResult code)
{
    switch (code) {
        case HCCL_SUCCESS: return "no error";
        case HCCL_E_PARA: return "parameter error";
        case HCCL_E_NOT_SUPPORT: return "not supported";
        case HCCL_E_TIMEOUT: return "timeout";
        case HCCL_E_REMOTE: return "remote error";
        default: return "simulated HCCL error";
    }
}

HcclResult HcclAllReduce(void* send, void* recv, uint64_t count, HcclDataType type, HcclReduceOp op, HcclComm comm,
                         aclrtStream)
{
    if (!reducible(type)) return not_reducible(type);
    auto *from = static_cast<char*>(send), *to = static_cast<char*>(recv);
    return get(comm).collective(
        describe("HcclAllReduce", count, type, op), count * element_size(type),
        [&](char* slot, size_t offset, size_t n) { std::memcpy(slot, from + offset, n); },
        [&](const auto& slots, size_t offset, size_t n) { reduce(to + offset, slots, n, type, op); });
}

HcclResult HcclReduce(void* send, void* recv, uint64_t count, HcclDataType type, HcclReduceOp op, uint32_t root,
                      HcclComm comm, aclrtStream)
{
    if (!reducible(type)) return not_reducible(type);
    Communicator& c = get(comm);
    auto *from = static_cast<char*>(send), *to = static_cast<char*>(recv);
    return c.collective(
        describe("HcclReduce", count, type, op, root), count * element_size(type),
        [&](char* slot, size_t offset, size_t n) { std::memcpy(slot, from + offset, n); },
        [&](const auto& slots, size_t offset, size_t n) {
            if (c.rank == root) reduce(to + offset, slots, n, type, op);
        });
}

HcclResult HcclBroadcast(void* buffer, uint64_t count, HcclDataType type, uint32_t root, HcclComm comm, aclrtStream)
{
    Communicator& c = get(comm);
    auto* bytes = static_cast<char*>(buffer);
    return c.collective(
        describe("HcclBroadcast", count, type, 0, root), count * element_size(type),
        [&](char* slot, size_t offset, size_t n) {
            if (c.rank == root) std::memcpy(slot, bytes + offset, n);
        },
        [&](const auto& slots, size_t offset, size_t n) {
            if (c.rank != root) std::memcpy(bytes + offset, slots[root], n);
        });
}

HcclResult HcclAllGather(void* send, void* recv, uint64_t count, HcclDataType type, HcclComm comm, aclrtStream)
{
    const size_t length = count * element_size(type);
    auto *from = static_cast<char*>(send), *to = static_cast<char*>(recv);
    return get(comm).collective(
        describe("HcclAllGather", count, type), length,
        [&](char* slot, size_t offset, size_t n) { std::memcpy(slot, from + offset, n); },
        [&](const auto& slots, size_t offset, size_t n) {
            for (size_t r = 0; r < slots.size(); ++r) std::memcpy(to + r * length + offset, slots[r], n);
        });
}

HcclResult HcclReduceScatter(void* send, void* recv, uint64_t count, HcclDataType type, HcclReduceOp op, HcclComm comm,
                             aclrtStream)
{
    if (!reducible(type)) return not_reducible(type);
    Communicator& c = get(comm);
    const size_t length = count * element_size(type);
    auto *from = static_cast<char*>(send), *to = static_cast<char*>(recv);
    return c.collective(
        describe("HcclReduceScatter", count, type, op), length * c.ranks,
        [&](char* slot, size_t offset, size_t n) { std::memcpy(slot, from + offset, n); },
        [&](const auto& slots, size_t offset, size_t n) {
            with_overlap(c.rank * length, length, offset, n, [&](size_t in_chunk, size_t in_segment, size_t bytes) {
                std::vector<const char*> parts(slots);
                for (const char*& part : parts) part += in_chunk;
                reduce(to + in_segment, parts, bytes, type, op);
            });
        });
}

HcclResult HcclScatter(void* send, void* recv, uint64_t count, HcclDataType type, uint32_t root, HcclComm comm,
                       aclrtStream)
{
    Communicator& c = get(comm);
    const size_t length = count * element_size(type);
    auto *from = static_cast<char*>(send), *to = static_cast<char*>(recv);
    return c.collective(
        describe("HcclScatter", count, type, 0, root), length * c.ranks,
        [&](char* slot, size_t offset, size_t n) { if (c.rank == root) std::memcpy(slot, from + offset, n); },
        [&](const auto& slots, size_t offset, size_t n) {
            with_overlap(c.rank * length, length, offset, n, [&](size_t in_chunk, size_t in_segment, size_t bytes) {
                std::memcpy(to + in_segment, slots[root] + in_chunk, bytes);
            });
        });
}

HcclResult HcclBarrier(HcclComm comm, aclrtStream)
{
    const auto nothing = [](const auto&, size_t, size_t) {};
    return get(comm).collective(describe("HcclBarrier", 0, HCCL_DATA_TYPE_INT8), 0, nothing, nothing);
}

HcclResult HcclAlltoAllV(const void* send, const void* send_counts, const void* send_starts, HcclDataType send_type,
                         const void* recv, const void* recv_counts, const void* recv_starts, HcclDataType recv_type,
                         HcclComm comm, aclrtStream stream)
{
    if (const HcclResult result = HcclBarrier(comm, stream)) return result;
    std::vector<Transfer> transfers;
    const auto add = [&](bool is_send, uint32_t peer, const void* buffer, const void* counts, const void* starts,
                         HcclDataType type) {
        const uint64_t start = static_cast<const uint64_t*>(starts)[peer] * element_size(type);
        const uint64_t bytes = static_cast<const uint64_t*>(counts)[peer] * element_size(type);
        transfers.push_back({is_send, peer, static_cast<char*>(const_cast<void*>(buffer)) + start, bytes});
    };
    for (uint32_t peer = 0; peer < get(comm).ranks; ++peer) {
        add(true, peer, send, send_counts, send_starts, send_type);
        add(false, peer, recv, recv_counts, recv_starts, recv_type);
    }
    return get(comm).exchange(transfers);
}

HcclResult HcclAlltoAll(const void* send, uint64_t send_count, HcclDataType send_type, const void* recv,
                        uint64_t recv_count, HcclDataType recv_type, HcclComm comm, aclrtStream stream)
{
    const uint32_t ranks = get(comm).ranks;
    std::vector<uint64_t> send_counts(ranks, send_count), recv_counts(ranks, recv_count), send_starts, recv_starts;
    for (uint32_t r = 0; r < ranks; ++r) {
        send_starts.push_back(r * send_count);
        recv_starts.push_back(r * recv_count);
    }
    return HcclAlltoAllV(send, send_counts.data(), send_starts.data(), send_type, recv, recv_counts.data(),
                         recv_starts.data(), recv_type, comm, stream);
}

HcclResult HcclSend(void* buffer, uint64_t count, HcclDataType type, uint32_t peer, HcclComm comm, aclrtStream)
{
    std::vector<Transfer> one{{true, peer, static_cast<char*>(buffer), count * element_size(type)}};
    return get(comm).exchange(one);
}

HcclResult HcclRecv(void* buffer, uint64_t count, HcclDataType type, uint32_t peer, HcclComm comm, aclrtStream)
{
    std::vector<Transfer> one{{false, peer, static_cast<char*>(buffer), count * element_size(type)}};
    return get(comm).exchange(one);
}

HcclResult HcclBatchSendRecv(HcclSendRecvItem* items, uint32_t count, HcclComm comm, aclrtStream)
{
    std::vector<Transfer> transfers;
    for (uint32_t i = 0; i < count; ++i)
        transfers.push_back({items[i].sendRecvType == HCCL_SEND, items[i].remoteRank, static_cast<char*>(items[i].buf),
                             items[i].count * element_size(items[i].dataType)});
    return get(comm).exchange(transfers);
}

}  // extern "C"
