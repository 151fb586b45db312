//! The `Range` and `Accept-Encoding` headers of downloads.

/// What part of a file of `size` bytes to send.
#[derive(Debug, PartialEq, Eq)]
pub enum Range {
    Whole,
    /// First and last byte, inclusive.
    Part(u64, u64),
    Unsatisfiable,
}

/// Reads one byte range. Several ranges, other units and malformed headers mean the whole file, as RFC 9110 allows.
pub fn parse_range(header: Option<&str>, size: u64) -> Range {
    let Some(spec) = header.and_then(|h| h.trim().strip_prefix("bytes=")) else {
        return Range::Whole;
    };
    let Some((first, last)) = spec.split_once('-') else {
        return Range::Whole;
    };
    let (first, last) = (first.trim(), last.trim());
    if first.is_empty() {
        return match last.parse::<u64>() {
            Err(_) => Range::Whole,
            Ok(0) => Range::Unsatisfiable,
            Ok(_) if size == 0 => Range::Unsatisfiable,
            Ok(n) => Range::Part(size.saturating_sub(n), size - 1),
        };
    }
    let Ok(first) = first.parse::<u64>() else {
        return Range::Whole;
    };
    let last = match last {
        "" => u64::MAX,
        text => match text.parse::<u64>() {
            Ok(last) if last >= first => last,
            _ => return Range::Whole,
        },
    };
    if first >= size {
        return Range::Unsatisfiable;
    }
    Range::Part(first, last.min(size - 1))
}

#[derive(Debug, PartialEq, Eq)]
pub enum Encoding {
    Identity,
    Gzip,
    NotAcceptable,
}

/// Compresses only for clients that ask for gzip and nothing else: HTTP libraries list it by default, and compressing
/// costs a small guest more than the local network does.
pub fn choose_encoding(header: Option<&str>) -> Encoding {
    let Some(header) = header.filter(|h| !h.trim().is_empty()) else {
        return Encoding::Identity;
    };
    let codings: Vec<(String, bool)> = header
        .split(',')
        .map(|item| {
            let (name, parameters) = item.split_once(';').unwrap_or((item, ""));
            let quality = parameters.trim().strip_prefix("q=");
            let refused = quality.and_then(|q| q.trim().parse::<f32>().ok()) == Some(0.0);
            (name.trim().to_ascii_lowercase(), !refused)
        })
        .collect();
    let state = |name: &str| codings.iter().find(|(n, _)| n == name).map(|(_, ok)| *ok);
    let gzip = state("gzip").or(state("*")).unwrap_or(false);
    let identity = state("identity").or(state("*")).unwrap_or(true);
    if gzip && (codings.len() == 1 && codings[0].0 == "gzip" || !identity) {
        Encoding::Gzip
    } else if identity {
        Encoding::Identity
    } else {
        Encoding::NotAcceptable
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges() {
        let r = |h, size| parse_range(Some(h), size);
        assert_eq!(parse_range(None, 10), Range::Whole);
        assert_eq!(r("bytes=0-3", 10), Range::Part(0, 3));
        assert_eq!(r("bytes=4-", 10), Range::Part(4, 9));
        assert_eq!(r("bytes=-3", 10), Range::Part(7, 9));
        assert_eq!(r("bytes=-30", 10), Range::Part(0, 9));
        assert_eq!(r("bytes=8-99", 10), Range::Part(8, 9));
        assert_eq!(r("bytes=10-", 10), Range::Unsatisfiable);
        assert_eq!(r("bytes=0-", 0), Range::Unsatisfiable);
        assert_eq!(r("bytes=-0", 10), Range::Unsatisfiable);
        assert_eq!(r("bytes=5-4", 10), Range::Whole);
        assert_eq!(r("bytes=0-1,3-4", 10), Range::Whole);
        assert_eq!(r("lines=0-1", 10), Range::Whole);
    }

    #[test]
    fn encodings() {
        let c = |h| choose_encoding(Some(h));
        assert_eq!(choose_encoding(None), Encoding::Identity);
        assert_eq!(c("gzip"), Encoding::Gzip);
        assert_eq!(c("gzip, deflate, br"), Encoding::Identity);
        assert_eq!(c("gzip, identity;q=0"), Encoding::Gzip);
        assert_eq!(c("br"), Encoding::Identity);
        assert_eq!(c("br, identity;q=0"), Encoding::NotAcceptable);
        assert_eq!(c("*;q=0"), Encoding::NotAcceptable);
        assert_eq!(c("gzip;q=0"), Encoding::Identity);
    }
}
