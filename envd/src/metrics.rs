//! `GET /metrics`.

use crate::app::App;
use crate::http::{blocking, json, HttpError, Response};
use std::fs;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

/// Busy and total CPU ticks at the previous reading: usage is what happened between two readings.
#[derive(Default)]
pub struct CpuMeter(Mutex<(u64, u64)>);

impl CpuMeter {
    fn used_percent(&self, stat: &str) -> f64 {
        let Some((busy, total)) = cpu_ticks(stat) else { return 0.0 };
        let mut last = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let (busy_delta, total_delta) = (busy.saturating_sub(last.0), total.saturating_sub(last.1));
        *last = (busy, total);
        if total_delta == 0 {
            return 0.0;
        }
        (10_000.0 * busy_delta as f64 / total_delta as f64).round() / 100.0
    }
}

/// Busy and total ticks of all CPUs together, from `/proc/stat`.
fn cpu_ticks(stat: &str) -> Option<(u64, u64)> {
    let line = stat.lines().next()?.strip_prefix("cpu ")?;
    // user nice system idle iowait irq softirq steal; guest time is part of user time.
    let ticks: Vec<u64> = line.split_whitespace().take(8).filter_map(|v| v.parse().ok()).collect();
    let idle = ticks.get(3)? + ticks.get(4)?;
    let total: u64 = ticks.iter().sum();
    Some((total - idle, total))
}

/// Bytes of a field of `/proc/meminfo`.
fn memory(meminfo: &str, field: &str) -> u64 {
    let value = meminfo.lines().find_map(|line| {
        let rest = line.strip_prefix(field)?.strip_prefix(':')?;
        rest.split_whitespace().next()?.parse::<u64>().ok()
    });
    value.unwrap_or(0) * 1024
}

fn disk() -> (u64, u64) {
    // SAFETY: `stat` is plain data, filled by the call; the path is a valid C string.
    unsafe {
        let mut stat: libc::statvfs = std::mem::zeroed();
        if libc::statvfs(b"/\0".as_ptr().cast(), &mut stat) < 0 {
            return (0, 0);
        }
        let total = stat.f_blocks * stat.f_frsize;
        (total - stat.f_bfree * stat.f_frsize, total)
    }
}

pub async fn get(app: Arc<App>) -> Result<Response, HttpError> {
    let body = blocking(move || {
        let meminfo = fs::read_to_string("/proc/meminfo").unwrap_or_default();
        let stat = fs::read_to_string("/proc/stat").unwrap_or_default();
        let cpus = stat.lines().filter(|l| l.starts_with("cpu") && !l.starts_with("cpu ")).count();
        let total = memory(&meminfo, "MemTotal");
        let used = total.saturating_sub(memory(&meminfo, "MemAvailable"));
        let cache = memory(&meminfo, "Cached") + memory(&meminfo, "Buffers");
        let (disk_used, disk_total) = disk();
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        serde_json::json!({
            "ts": now.as_secs(),
            "cpu_count": cpus,
            "cpu_used_pct": app.cpu.used_percent(&stat),
            "mem_total": total,
            "mem_used": used,
            "mem_cache": cache,
            "mem_total_mib": total >> 20,
            "mem_used_mib": used >> 20,
            "disk_used": disk_used,
            "disk_total": disk_total,
        })
    })
    .await?;
    Ok(json(body.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn readings() {
        assert_eq!(cpu_ticks("cpu  10 0 20 60 10 0 0 0 5 5\ncpu0 1"), Some((30, 100)));
        assert_eq!(memory("MemTotal:  4 kB\nCached: 2 kB\n", "Cached"), 2048);
        let meter = CpuMeter::default();
        assert_eq!(meter.used_percent("cpu 50 0 0 50 0 0 0 0"), 50.0);
        assert_eq!(meter.used_percent("cpu 50 0 0 150 0 0 0 0"), 0.0);
    }
}
