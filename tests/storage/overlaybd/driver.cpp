// A driver around overlaybd's own LSMT and ZFile code, to check another implementation against it.
//
//   compress IN OUT lz4|zstd BLOCK_KIB
//   extract IN OUT
//   verify IN
//   read OUT LAYER...                             the virtual disk of a stack, bottom first; layers may be ZFiles
//   commit OUT VIRTUAL_SIZE [lz4|zstd BLOCK_KIB]  one layer of the writes on stdin:
//                                                 "w OFFSET LENGTH SEED" or "z OFFSET LENGTH", one per line
//
// Data of a write: 64 equal bytes, the top byte of the generator's state, after each step of the generator.

#include <fcntl.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include <photon/common/alog.h>
#include <photon/fs/filesystem.h>
#include <photon/fs/localfs.h>
#include <photon/photon.h>

#include "overlaybd/lsmt/file.h"
#include "overlaybd/zfile/zfile.h"

using photon::fs::IFile;
using photon::fs::IFileSystem;

static IFileSystem *files;
static const size_t CHUNK = 512 << 10;

static IFile *open_file(const std::string &path, bool create) {
    auto file = files->open(path.c_str(), create ? O_RDWR | O_CREAT | O_TRUNC : O_RDONLY, 0644);
    if (!file) {
        perror(path.c_str());
        exit(2);
    }
    return file;
}

static ZFile::CompressArgs arguments(const char *algorithm, const char *block_kib, bool overwrite_header) {
    ZFile::CompressOptions options;
    options.verify = 1;
    options.algo = !strcmp(algorithm, "zstd") ? ZFile::CompressOptions::ZSTD : ZFile::CompressOptions::LZ4;
    options.block_size = atoi(block_kib) * 1024;
    return ZFile::CompressArgs(options, nullptr, nullptr, overwrite_header);
}

static int read_stack(const char *out_path, int count, char **paths) {
    std::vector<IFile *> layers;
    for (int i = 0; i < count; i++) {
        auto file = open_file(paths[i], false);
        if (ZFile::is_zfile(file) == 1) file = ZFile::zfile_open_ro(file, true, true);
        if (!file) return 3;
        layers.push_back(file);
    }
    auto stack = LSMT::open_files_ro(layers.data(), layers.size(), true);
    if (!stack) return 4;
    struct stat st;
    stack->fstat(&st);
    auto out = open_file(out_path, true);
    std::vector<char> buffer(CHUNK);
    for (off_t at = 0; at < st.st_size;) {
        auto length = std::min<size_t>(CHUNK, st.st_size - at);
        if (stack->pread(buffer.data(), length, at) != (ssize_t)length) return 5;
        if (out->pwrite(buffer.data(), length, at) != (ssize_t)length) return 6;
        at += length;
    }
    return 0;
}

static int replay(LSMT::IFileRW *layer) {
    char what;
    unsigned long long offset, length, seed;
    while (scanf(" %c %llu %llu", &what, &offset, &length) == 3) {
        if (what == 'z') {
            if (layer->trim(offset, length) < 0) return 8;
            continue;
        }
        if (scanf("%llu", &seed) != 1) return 1;
        std::vector<unsigned char> data(length);
        for (size_t i = 0; i < length; i++) {
            if (i % 64 == 0) seed = seed * 6364136223846793005ULL + 1442695040888963407ULL;
            data[i] = seed >> 56;
        }
        for (size_t i = 0; i < length; i += CHUNK)
            if (layer->pwrite(data.data() + i, std::min<size_t>(length - i, CHUNK), offset + i) < 0) return 7;
    }
    return 0;
}

static int commit(const std::string &path, const char *size, const char *algorithm, const char *block_kib) {
    LSMT::LayerInfo info(open_file(path + ".data", true), open_file(path + ".index", true));
    info.virtual_size = strtoull(size, nullptr, 10);
    auto layer = LSMT::create_file_rw(info, true);
    if (!layer) return 3;
    if (auto failed = replay(layer)) return failed;
    auto out = open_file(path, true);
    IFile *target = out;
    if (algorithm) {
        // The builder keeps a pointer to its arguments.
        auto kept = new ZFile::CompressArgs(arguments(algorithm, block_kib, true));
        target = ZFile::new_zfile_builder(out, kept, false);
    }
    LSMT::CommitArgs args(target);
    if (layer->commit(args) < 0) return 9;
    if (target != out) target->close();
    return out->close() ? 9 : 0;
}

int main(int argc, char **argv) {
    if (argc < 3) return 1;
    set_log_output_level(ALOG_ERROR);
    photon::init(photon::INIT_EVENT_DEFAULT, photon::INIT_IO_DEFAULT);
    files = photon::fs::new_localfs_adaptor();
    std::string command = argv[1];
    if (command == "extract" && argc == 4)
        return ZFile::zfile_decompress(open_file(argv[2], false), open_file(argv[3], true)) ? 1 : 0;
    if (command == "verify") return ZFile::zfile_validation_check(open_file(argv[2], false)) ? 1 : 0;
    if (command == "compress" && argc == 6) {
        auto args = arguments(argv[4], argv[5], false);
        return ZFile::zfile_compress(open_file(argv[2], false), open_file(argv[3], true), &args) ? 1 : 0;
    }
    if (command == "read") return read_stack(argv[2], argc - 3, argv + 3);
    if (command == "commit" && argc >= 4)
        return commit(argv[2], argv[3], argc > 5 ? argv[4] : nullptr, argc > 5 ? argv[5] : nullptr);
    return 1;
}
