//! Random requests, many at a time, on a real chain of files, against a plain copy of the disk in memory. QEMU's own
//! programs say whether the files are what they should be.

use std::cell::RefCell;
use std::collections::HashMap;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::rc::Rc;

use crate::engine::{Engine, Op, Reads};
use crate::layer::Handle;

const MIB: usize = 1 << 20;
const CLUSTER: usize = 1 << 16;

struct Dice(u64);

impl Dice {
    fn next(&mut self, below: usize) -> usize {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        ((self.0 >> 33) as usize) % below
    }
    fn fill(&mut self, buffer: &mut [u8]) {
        let byte = 1 + self.next(255) as u8;
        buffer.iter_mut().enumerate().for_each(|(n, b)| *b = byte ^ (n / 512) as u8 | 1);
    }
}

/// Reads that are done when the test says so, in any order, and in pieces.
struct Later {
    dice: Dice,
    waiting: Vec<(u64, File, *mut u8, usize, u64)>,
    eager: bool,
}

impl Reads for Later {
    fn now(&mut self, file: &Handle, buffer: &mut [u8], at: u64) -> Option<std::io::Result<usize>> {
        if !self.eager && self.dice.next(3) > 0 {
            return None;
        }
        Some(crate::header::read_up_to(&file.file, buffer, at))
    }
    fn later(&mut self, token: u64, file: &Handle, to: *mut u8, length: usize, at: u64) {
        self.waiting.push((token, file.file.try_clone().unwrap(), to, length, at));
    }
}

struct Disk {
    folder: PathBuf,
    engine: Engine,
    io: Later,
    dice: Dice,
    model: Vec<u8>,
    flying: HashMap<u64, (Op, usize, Vec<u8>)>,
    next: u64,
    noted: Rc<RefCell<PathBuf>>,
    layers: usize,
}

fn run(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program).args(arguments).output().expect("qemu-img is needed");
    let text =
        format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{program} {arguments:?}: {text}");
    text
}

impl Disk {
    fn new(name: &str, seed: u64, size: usize) -> Disk {
        let folder = std::env::temp_dir().join(format!("aenv-blockd-{}-{name}-{seed}", std::process::id()));
        let _ = fs::remove_dir_all(&folder);
        fs::create_dir_all(&folder).unwrap();
        let mut dice = Dice(seed ^ 0x5555);
        let mut model = vec![0; size];
        for at in (0..size).step_by(3 * MIB) {
            let end = (at + MIB).min(size);
            dice.fill(&mut model[at..end]);
        }
        fs::write(folder.join("base"), &model).unwrap();
        let disk = folder.join("0.qcow2");
        create(&disk, &folder.join("base"), "raw");
        let noted = Rc::new(RefCell::new(disk.clone()));
        let engine = open(&disk, &noted);
        let io = Later { dice: Dice(seed ^ 0xaaaa), waiting: Vec::new(), eager: false };
        Disk { folder, engine, io, dice, model, flying: HashMap::new(), next: 0, noted, layers: 0 }
    }

    fn layer(&self, number: usize) -> PathBuf {
        self.folder.join(format!("{number}.qcow2"))
    }

    fn submit(&mut self, op: Op, offset: usize, mut data: Vec<u8>) {
        let tag = self.next;
        self.next += 1;
        let (pointer, length) = (data.as_mut_ptr(), data.len());
        self.flying.insert(tag, (op, offset, data));
        self.engine.submit(&mut self.io, tag, op, offset as u64, length as u64, pointer);
        self.collect();
    }

    fn collect(&mut self) {
        for (tag, result) in self.engine.completed() {
            let (op, offset, data) = self.flying.remove(&tag).expect("completed once");
            let range = offset..offset + data.len();
            match op {
                Op::Read => {
                    assert_eq!(result, data.len() as i32);
                    assert!(data == self.model[range.clone()], "a read of {range:?} differs");
                }
                Op::Write => {
                    assert_eq!(result, data.len() as i32);
                    self.model[range].copy_from_slice(&data);
                }
                Op::Zero => {
                    assert_eq!(result, 0);
                    self.model[range].fill(0);
                }
                Op::Discard => {
                    assert_eq!(result, 0);
                    let first = range.start.div_ceil(CLUSTER) * CLUSTER;
                    let last =
                        if range.end == self.model.len() { range.end } else { range.end / CLUSTER * CLUSTER };
                    if first < last {
                        self.model[first..last].fill(0);
                    }
                }
            }
        }
    }

    fn random(&mut self) {
        let offset = self.dice.next(self.model.len() / 512) * 512;
        let length = [512, 4096, 4096, CLUSTER, 3 * CLUSTER, 500 * 512][self.dice.next(6)];
        let length = length.min(self.model.len() - offset);
        let (offset, length) = if self.dice.next(4) == 0 {
            let start = offset / CLUSTER * CLUSTER;
            (start, (length.div_ceil(CLUSTER) * CLUSTER).min(self.model.len() - start))
        } else {
            (offset, length)
        };
        let overlaps =
            |(_, at, data): &(Op, usize, Vec<u8>)| *at < offset + length && offset < at + data.len();
        if self.flying.values().any(overlaps) {
            return; // what such requests do is nobody's business
        }
        let mut data = vec![0; length];
        match self.dice.next(12) {
            0 => self.submit(Op::Zero, offset, data),
            1 => self.submit(Op::Discard, offset, data),
            2 => self.submit(Op::Write, offset, data), // of zeros
            3..=5 => self.submit(Op::Read, offset, data),
            _ => {
                self.dice.fill(&mut data);
                self.submit(Op::Write, offset, data);
            }
        }
    }

    /// Finish one read that waits.
    fn finish_one(&mut self) {
        if self.io.waiting.is_empty() {
            return;
        }
        let pick = self.dice.next(self.io.waiting.len());
        let (token, file, to, length, at) = self.io.waiting.swap_remove(pick);
        let result = match self.dice.next(20) {
            0 => -libc::EAGAIN,
            n => {
                let want = if n < 4 { self.dice.next(length) + 1 } else { length };
                // SAFETY: the engine keeps the buffer until it is told.
                let buffer = unsafe { std::slice::from_raw_parts_mut(to, want) };
                file.read_at(buffer, at).unwrap() as i32
            }
        };
        self.engine.read_done(&mut self.io, token, result);
        self.collect();
    }

    fn settle(&mut self) {
        while !self.flying.is_empty() {
            assert!(!self.io.waiting.is_empty(), "requests are stuck: {:?}", self.flying.keys());
            self.finish_one();
        }
    }

    fn work(&mut self, steps: usize) {
        for _ in 0..steps {
            if self.dice.next(3) > 0 || self.flying.len() > 24 {
                self.finish_one();
            } else {
                self.random();
            }
        }
    }

    /// Freeze the top while requests are under way.
    fn rebase(&mut self) {
        let (old, new) = (self.layer(self.layers), self.layer(self.layers + 1));
        create(&new, &old, "qcow2");
        let done = Rc::new(RefCell::new(None));
        let told = done.clone();
        let report = Box::new(move |result: std::io::Result<()>| *told.borrow_mut() = Some(result));
        self.engine.rebase(&mut self.io, new.clone(), report);
        while done.borrow().is_none() {
            self.random();
            self.finish_one();
        }
        done.borrow_mut().take().unwrap().unwrap();
        // What was completed by now and is in the frozen file, is the model of now, but for writes since.
        assert_eq!(self.engine.disk(), new);
        assert_eq!(*self.noted.borrow(), new);
        self.layers += 1;
        check(&old);
    }

    fn verify(&mut self) {
        self.settle();
        self.io.eager = true;
        for at in (0..self.model.len()).step_by(MIB) {
            let length = MIB.min(self.model.len() - at);
            self.submit(Op::Read, at, vec![0; length]);
            assert!(self.flying.is_empty());
        }
        self.io.eager = false;
        let top = self.engine.disk().to_path_buf();
        check(&top);
        assert!(contents(&top) == self.model, "QEMU reads something else");
    }

    fn reopen(&mut self) {
        self.settle();
        let top = self.engine.disk().to_path_buf();
        // The old one ends without a word, as after kill -9, once its lock is gone.
        let spare = self.folder.join("spare.qcow2");
        let _ = fs::remove_file(&spare);
        create(&spare, &self.folder.join("base"), "raw");
        drop(std::mem::replace(&mut self.engine, open(&spare, &Rc::new(RefCell::new(PathBuf::new())))));
        self.engine = open(&top, &self.noted);
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            let _ = fs::remove_dir_all(&self.folder);
        }
    }
}

fn open(disk: &Path, noted: &Rc<RefCell<PathBuf>>) -> Engine {
    let noted = noted.clone();
    let note = move |path: &Path| {
        *noted.borrow_mut() = path.to_path_buf();
        Ok(())
    };
    Engine::open(disk, Box::new(note)).unwrap()
}

fn create(path: &Path, backing: &Path, format: &str) {
    let (path, backing) = (path.to_str().unwrap(), backing.to_str().unwrap());
    run("qemu-img", &["create", "-q", "-f", "qcow2", "-b", backing, "-F", format, path]);
}

fn check(path: &Path) {
    let said = run("qemu-img", &["check", "-U", "-f", "qcow2", path.to_str().unwrap()]);
    assert!(said.contains("No errors were found"), "{said}");
}

fn contents(path: &Path) -> Vec<u8> {
    let raw = path.with_extension("raw");
    run(
        "qemu-img",
        &["convert", "-U", "-f", "qcow2", "-O", "raw", path.to_str().unwrap(), raw.to_str().unwrap()],
    );
    let found = fs::read(&raw).unwrap();
    fs::remove_file(raw).unwrap();
    found
}

fn seeds() -> Vec<u64> {
    match std::env::var("AENV_BLOCKD_SEEDS") {
        Ok(count) => (0..count.parse().expect("a number")).collect(),
        Err(_) => vec![1, 2, 3],
    }
}

#[test]
fn a_disk_reads_as_written_in_every_order() {
    for seed in seeds() {
        println!("seed {seed}");
        let mut disk = Disk::new("order", seed, 12 * MIB + 5 * 512);
        for _ in 0..3 {
            disk.work(1500);
            disk.verify();
        }
        disk.reopen();
        disk.work(500);
        disk.verify();
    }
}

#[test]
fn frozen_files_stay_as_they_were() {
    for seed in seeds() {
        println!("seed {seed}");
        let mut disk = Disk::new("freeze", seed, 8 * MIB);
        let mut frozen = Vec::new();
        for _ in 0..4 {
            disk.work(400);
            disk.settle();
            let was = disk.model.clone();
            let path = disk.engine.disk().to_path_buf();
            disk.rebase();
            disk.settle();
            // Requests that came during the rebase went to the new file, or were completed before it.
            let now = contents(&path);
            frozen.push((path, now.clone()));
            assert!(was == now || disk.model != was);
            disk.work(300);
            disk.rebase(); // with requests under way
            disk.work(100);
        }
        disk.verify();
        for (path, was) in frozen {
            assert!(contents(&path) == was, "{} changed after it was frozen", path.display());
        }
        disk.reopen();
        disk.work(300);
        disk.verify();
    }
}

#[test]
fn an_acknowledged_write_is_in_the_frozen_file() {
    let mut disk = Disk::new("ack", 7, 8 * MIB);
    for _ in 0..20 {
        disk.work(60); // some are under way now
        let acknowledged = disk.model.clone();
        let touched: Vec<_> = disk.flying.values().map(|(_, at, data)| *at..at + data.len()).collect();
        let path = disk.engine.disk().to_path_buf();
        let new = disk.layer(disk.layers + 1);
        create(&new, &path, "qcow2");
        let done = Rc::new(RefCell::new(false));
        let told = done.clone();
        disk.engine.rebase(
            &mut disk.io,
            new,
            Box::new(move |result| *told.borrow_mut() = result.map(|()| true).unwrap()),
        );
        while !*done.borrow() {
            disk.finish_one();
        }
        disk.layers += 1;
        let now = contents(&path);
        for at in (0..now.len()).step_by(512) {
            let same = now[at..at + 512] == acknowledged[at..at + 512];
            assert!(same || touched.iter().any(|range| range.contains(&at)), "sector at {at}");
        }
    }
    disk.verify();
}

#[test]
fn layers_below_are_replaced() {
    for seed in seeds() {
        println!("seed {seed}");
        let mut disk = Disk::new("replace", seed, 8 * MIB);
        for _ in 0..3 {
            disk.work(400);
            disk.rebase();
        }
        let merged = disk.folder.join("a-merged-layer-with-a-longer-name.qcow2");
        fs::copy(disk.layer(2), &merged).unwrap();
        let base = disk.folder.join("base");
        run(
            "qemu-img",
            &["rebase", "-f", "qcow2", "-b", base.to_str().unwrap(), "-F", "raw", merged.to_str().unwrap()],
        );
        disk.work(100);
        disk.engine.replace_backing(&merged).unwrap();
        (0..3).for_each(|number| fs::remove_file(disk.layer(number)).unwrap());
        disk.work(400);
        disk.verify();
        assert_eq!(disk.engine.chain(), [disk.layer(3), merged, base]);
        disk.reopen();
        disk.rebase();
        disk.work(200);
        disk.verify();
    }
}

#[test]
fn a_disk_grows() {
    for seed in seeds() {
        println!("seed {seed}");
        let mut disk = Disk::new("grow", seed, 5 * MIB + 512);
        disk.work(200);
        for size in [5 * MIB + 1024, 6 * MIB, 600 * MIB] {
            disk.settle();
            disk.engine.grow(size as u64).unwrap();
            disk.model.resize(size, 0);
            disk.work(200);
            let at = size - 3 * 512;
            let mut data = vec![0; 3 * 512];
            disk.dice.fill(&mut data);
            disk.settle();
            disk.submit(Op::Write, at, data);
            disk.settle();
        }
        assert!(disk.engine.grow(512).is_err());
        disk.verify();
        disk.rebase();
        disk.work(100);
        disk.verify();
    }
}

#[test]
fn a_longer_file_below_does_not_show_when_the_disk_grows() {
    for keep in [3 * MIB, 3 * MIB + 512, 3 * MIB + 4096] {
        let mut disk = Disk::new("hidden", keep as u64, 8 * MIB);
        let short = disk.folder.join("short.qcow2");
        let (base, size) = (disk.folder.join("base"), keep.to_string());
        run(
            "qemu-img",
            &[
                "create",
                "-q",
                "-f",
                "qcow2",
                "-b",
                base.to_str().unwrap(),
                "-F",
                "raw",
                short.to_str().unwrap(),
                &size,
            ],
        );
        disk.engine = open(&short, &disk.noted);
        disk.model.truncate(keep);
        disk.engine.grow(5 * MIB as u64).unwrap();
        disk.model.resize(5 * MIB, 0);
        disk.verify();
    }
}

#[test]
fn a_large_table_moves_when_it_must_grow() {
    let mut disk = Disk::new("table", 1, MIB);
    disk.work(50);
    disk.settle();
    // A cluster of L1 entries covers 4 TiB.
    disk.engine.grow(9 << 40).unwrap();
    let mut data = vec![0; 4096];
    disk.dice.fill(&mut data);
    disk.engine.submit(&mut disk.io, u64::MAX - 1, Op::Write, (9 << 40) - 4096, 4096, data.as_mut_ptr());
    assert_eq!(disk.engine.completed(), [(u64::MAX - 1, 4096)]);
    check(&disk.layer(0));
    disk.reopen();
    let mut back = vec![0; 4096];
    disk.io.eager = true;
    disk.engine.submit(&mut disk.io, u64::MAX - 2, Op::Read, (9 << 40) - 4096, 4096, back.as_mut_ptr());
    assert_eq!(disk.engine.completed(), [(u64::MAX - 2, 4096)]);
    assert!(back == data);
    check(&disk.layer(0));
}

#[test]
fn space_is_given_back_and_used_again() {
    let mut disk = Disk::new("space", 1, 16 * MIB);
    let top = disk.layer(0);
    let blocks = |path: &Path| std::os::unix::fs::MetadataExt::blocks(&fs::metadata(path).unwrap());
    let length = |path: &Path| fs::metadata(path).unwrap().len();
    let fill = |disk: &mut Disk| {
        for at in (0..16 * MIB).step_by(MIB) {
            let mut data = vec![0; MIB];
            disk.dice.fill(&mut data);
            disk.submit(Op::Write, at, data);
        }
    };
    fill(&mut disk);
    let full = (length(&top), blocks(&top));
    disk.submit(Op::Discard, 0, vec![0; 16 * MIB]);
    assert!(blocks(&top) * 10 < full.1, "discarded clusters are holes");
    fill(&mut disk);
    assert!(length(&top) <= full.0 + CLUSTER as u64, "the same clusters are used again");
    for at in (0..16 * MIB).step_by(MIB) {
        disk.submit(Op::Write, at, vec![0; MIB]);
    }
    assert!(blocks(&top) * 10 < full.1, "zeros that are written take no space");
    disk.verify();
}

#[test]
fn files_that_cannot_be_written_to_are_refused() {
    let disk = Disk::new("refuse", 1, MIB);
    let note = || Box::new(|_: &Path| Ok(()));
    let error = |path: &Path| Engine::open(path, note()).err().expect("refused").to_string();
    assert!(error(&disk.layer(0)).contains("another process writes"));
    let old = disk.folder.join("old.qcow2");
    run("qemu-img", &["create", "-q", "-f", "qcow2", "-o", "compat=0.10", old.to_str().unwrap(), "1M"]);
    assert!(error(&old).contains("version 3"));
    let kept = disk.folder.join("kept.qcow2");
    run("qemu-img", &["create", "-q", "-f", "qcow2", kept.to_str().unwrap(), "1M"]);
    run("qemu-img", &["snapshot", "-c", "one", kept.to_str().unwrap()]);
    assert!(error(&kept).contains("internal snapshots"));
    let secret = disk.folder.join("text");
    fs::write(&secret, "text").unwrap();
    assert!(error(&secret).contains("not a usable qcow2"));
    let guess = disk.folder.join("guess.qcow2");
    run(
        "qemu-img",
        &[
            "create",
            "-q",
            "-u",
            "-f",
            "qcow2",
            "-b",
            "/etc/passwd",
            "-F",
            "vmdk",
            guess.to_str().unwrap(),
            "1M",
        ],
    );
    assert!(error(&guess).contains("vmdk"));
}

#[test]
fn a_rebase_on_the_wrong_file_is_refused_and_changes_nothing() {
    let mut disk = Disk::new("wrong", 1, MIB);
    let over_base = disk.folder.join("x.qcow2");
    create(&over_base, &disk.folder.join("base"), "raw");
    let result = Rc::new(RefCell::new(None));
    let told = result.clone();
    disk.engine.rebase(&mut disk.io, over_base, Box::new(move |r| *told.borrow_mut() = Some(r)));
    assert!(result.borrow().as_ref().unwrap().is_err());
    assert_eq!(disk.engine.disk(), disk.layer(0));
    disk.work(200);
    disk.verify();
}

#[test]
fn a_full_disk_holds_writes_until_there_is_room() {
    // A small filesystem of its own needs root.
    let folder = std::env::temp_dir().join(format!("aenv-blockd-{}-full", std::process::id()));
    fs::create_dir_all(&folder).unwrap();
    let mount = ["-t", "tmpfs", "-o", "size=1m", "none", folder.to_str().unwrap()];
    if !Command::new("mount").args(mount).status().is_ok_and(|status| status.success()) {
        println!("no mount: skipped");
        fs::remove_dir_all(&folder).unwrap();
        return;
    }
    let mut disk = Disk::new("full", 1, 4 * MIB);
    let top = folder.join("top.qcow2");
    create(&top, &disk.folder.join("base"), "raw");
    disk.engine = open(&top, &disk.noted);
    let mut expected = disk.model.clone();
    for at in (0..4 * MIB).step_by(CLUSTER) {
        let mut data = vec![0; CLUSTER];
        disk.dice.fill(&mut data);
        expected[at..at + CLUSTER].copy_from_slice(&data);
        disk.submit(Op::Write, at, data);
        while !disk.io.waiting.is_empty() {
            disk.finish_one();
        }
    }
    assert!(disk.engine.full() && !disk.flying.is_empty());
    let larger = ["-o", "remount,size=16m", folder.to_str().unwrap()];
    assert!(Command::new("mount").args(larger).status().unwrap().success());
    disk.engine.retry(&mut disk.io);
    disk.collect();
    assert!(disk.flying.is_empty() && !disk.engine.full());
    assert!(disk.model == expected);
    disk.verify();
    let spare = disk.folder.join("spare.qcow2");
    create(&spare, &disk.folder.join("base"), "raw");
    disk.engine = open(&spare, &disk.noted);
    assert!(Command::new("umount").arg(&folder).status().unwrap().success());
    fs::remove_dir_all(&folder).unwrap();
}
