//! Plain versions of the algorithms, as in the reference: slow, with loops over all bins and removal from the middle of lists.

pub(super) fn first_fit(lengths: &[usize], order: &[usize], capacity: usize) -> Vec<Vec<usize>> {
    let mut bins: Vec<Vec<usize>> = Vec::new();
    for &index in order {
        let load = |bin: &Vec<usize>| bin.iter().map(|other| lengths[*other]).sum::<usize>();
        match bins.iter_mut().find(|bin| load(bin) + lengths[index] <= capacity) {
            Some(bin) => bin.push(index),
            None => bins.push(vec![index]),
        }
    }
    bins
}

pub(super) fn first_fit_decreasing(lengths: &[usize], capacity: usize) -> Vec<Vec<usize>> {
    let mut pairs: Vec<(usize, usize)> = lengths.iter().copied().zip(0..).collect();
    pairs.sort_unstable();
    let order: Vec<usize> = pairs.into_iter().rev().map(|(_, index)| index).collect();
    first_fit(lengths, &order, capacity)
}

pub(super) fn modified(lengths: &[usize], capacity: usize) -> Vec<Vec<usize>> {
    let load = |bin: &[usize]| bin.iter().map(|index| lengths[*index]).sum::<usize>();
    let class = |lower: f64, upper: f64| -> Vec<usize> {
        (0..lengths.len())
            .filter(|index| {
                let size = lengths[*index] as f64;
                size > capacity as f64 * lower && size <= capacity as f64 * upper
            })
            .collect()
    };
    let descending = |mut class: Vec<usize>| {
        class.sort_by(|a, b| lengths[*b].cmp(&lengths[*a]));
        class
    };
    let ascending = |mut class: Vec<usize>| {
        class.sort_by(|a, b| lengths[*a].cmp(&lengths[*b]));
        class
    };
    let large = descending(class(1.0 / 2.0, 1.0));
    let mut medium = descending(class(1.0 / 3.0, 1.0 / 2.0));
    let mut small = ascending(class(1.0 / 6.0, 1.0 / 3.0));
    let tiny = ascending(class(0.0, 1.0 / 6.0));

    let mut bins: Vec<Vec<usize>> = large.into_iter().map(|index| vec![index]).collect();
    for bin in &mut bins {
        if let Some(at) = medium.iter().position(|index| load(bin) + lengths[*index] <= capacity) {
            bin.push(medium.remove(at));
        }
    }
    for bin in bins.iter_mut().rev() {
        if bin.len() > 1 || small.len() < 2 || load(bin) + lengths[small[0]] + lengths[small[1]] > capacity {
            continue;
        }
        bin.push(small.remove(0));
        let at = small.iter().rposition(|index| load(bin) + lengths[*index] <= capacity).unwrap();
        bin.push(small.remove(at));
    }
    let mut rest = descending([medium, small, tiny].concat());
    for bin in &mut bins {
        while let Some(at) = rest.iter().position(|index| load(bin) + lengths[*index] <= capacity) {
            bin.push(rest.remove(at));
        }
    }
    let mut further: Vec<Vec<usize>> = Vec::new();
    for index in rest {
        let mut bin = match further.first() {
            Some(least) if load(least) + lengths[index] <= capacity => further.remove(0),
            _ => Vec::new(),
        };
        bin.push(index);
        let at = further.partition_point(|other| load(other) <= load(&bin));
        further.insert(at, bin);
    }
    bins.extend(further);
    bins
}
